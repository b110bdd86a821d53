"""Errors in the benchmarks are those of a reduce-scatter."""

import torch

from benchmarks.aggregation import reduced, relative, scattered
from benchmarks.speed import best_times
from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_codec

UNIT = Unit("matrices", (Block("a", 4, 3), Block("b", 8, 2)))


def test_chunk_has_its_rows_of_every_block():
    a, b = torch.arange(12.0).view(4, 3), 100 + torch.arange(16.0).view(8, 2)
    laid_out = scattered(torch.cat([a.flatten(), b.flatten()]), UNIT, 2)
    first, second = laid_out.chunk(2)
    assert torch.equal(first, torch.cat([a[:2].flatten(), b[:4].flatten()]))
    assert torch.equal(second, torch.cat([a[2:].flatten(), b[4:].flatten()]))
    assert first.numel() == sum(UNIT.chunk_sizes(2))


def test_uncompressed_mean_is_exact_and_all_bytes_are_counted():
    vectors = list(torch.randint(-8, 8, (4, 64)).float())
    mean, sent = reduced(make_codec("none"), vectors, 0)
    assert torch.equal(mean, torch.stack(vectors).mean(0))
    assert sent == 4 * 4 * 64


def test_error_feedback_conserves_the_input():
    codec, n = make_codec("topk:density=0.25"), 64
    residuals = [torch.zeros(n) for _ in range(2)]
    applied, exact = torch.zeros(n), torch.zeros(n)
    for step in range(5):
        vectors = [torch.randn(n), torch.randn(n)]
        mean, _ = reduced(codec, vectors, step, residuals)
        applied, exact = applied + mean, exact + torch.stack(vectors).mean(0)
    held_back = torch.stack(residuals).mean(0)
    torch.testing.assert_close(applied + held_back, exact, rtol=1e-5, atol=1e-6)


def test_error_without_magnitude_is_that_of_the_scaled_sum():
    exact = torch.randn(100)
    assert relative(3 * exact, exact, magnitude=False) < 1e-6
    assert relative(3 * exact, exact) > 1.9


def test_slow_calls_get_two_repetitions_and_no_more():
    calls = []
    best_times({"slow": lambda: calls.append(0)}, repetitions=50, limit_s=0.0)
    assert len(calls) == 2
