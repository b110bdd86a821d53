"""Errors in the benchmarks are those of a reduce-scatter; every codec has a row."""

import pytest
import torch

from benchmarks.codecs import SPECS, reduction, relative_error, scattered
from benchmarks.gradients import UNIT, RecordedGradients
from benchmarks.rivals import RIVALS
from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_method
from shardlab.strategy.codec_table import BUILT_IN
from tests.ranks import on_ranks


@pytest.mark.parametrize("spec", sorted({*SPECS, *(rival.ours for rival in RIVALS)}))
def test_every_spec_makes_a_codec(spec):
    make_method(spec)


def test_every_built_in_codec_is_listed():
    assert {spec.partition(":")[0] for spec in SPECS} == {*BUILT_IN}


def test_chunk_has_its_rows_of_every_block():
    unit = Unit("matrices", (Block("a", 4, 3), Block("b", 8, 2)))
    a, b = torch.arange(12.0).view(4, 3), 100 + torch.arange(16.0).view(8, 2)
    first, second = scattered(torch.cat([a.flatten(), b.flatten()]), unit, 2).chunk(2)
    assert torch.equal(first, torch.cat([a[:2].flatten(), b[:4].flatten()]))
    assert torch.equal(second, torch.cat([a[2:].flatten(), b[4:].flatten()]))
    assert first.numel() == sum(unit.chunk_sizes(2))


def test_error_without_magnitude_is_that_of_the_scaled_sum():
    exact = torch.randn(100)
    assert relative_error(3 * exact, exact, scale=True) < 1e-6
    assert relative_error(3 * exact, exact) > 1.9


@pytest.mark.parametrize(("spec", "bits", "largest"), [("none", 32, 1e-6), ("bf16", 16, 5e-3)])
@on_ranks(2)
def test_a_reduction_has_the_bits_and_the_error_of_its_codec(group, spec, bits, largest):
    n = sum(block.rows * block.columns for block in UNIT.blocks)
    ranks = torch.randn(2, n, generator=torch.Generator().manual_seed(0))
    figures = reduction(spec, RecordedGradients(ranks, ranks, ranks[0]), group)
    assert figures["bits"] == bits
    assert figures["error"] < largest
