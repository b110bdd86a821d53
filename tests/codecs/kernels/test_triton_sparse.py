"""Selection, index coding, scatter, estimates and random positions in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.kernels import indices, scatter, select, sketch
from shardlab.codecs.kernels.random import random_places
from tests.codecs.kernels.kernel_vectors import any_bits, bits, places, sorted_places, with_ties
from tests.codecs.kernels.triton_served import on_reference, on_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="on a GPU tests/codecs/test_devices.py runs the kernels themselves",
)

CODINGS = st.sampled_from(["smaller", "elias_fano", "bitmap"])
FLOORS = st.sampled_from([0, 1, 0x3F800000, 0x7F800000, 0x7FFFFFFF])
MANY = any_bits(5000, 1)


@given(st.one_of(st.just(MANY), with_ties()), st.floats(0, 1), FLOORS, st.booleans())
@settings(max_examples=25)
def test_selection_keeps_the_largest_and_the_first_of_equal_ones(x, share, floor, with_residual):
    k = round(share * len(x))
    residual = torch.linspace(-1, 1, len(x)) if with_residual else None
    wanted = x + residual if with_residual else x
    kept = torch.zeros(len(x)) if with_residual else None
    with on_triton():
        values, at = select.largest(x, k, floor, residual, kept)
    expected = sorted_places(wanted, k, floor)
    assert at.tolist() == expected
    assert bits(values) == bits(wanted[expected])
    if with_residual:
        assert bits(kept) == bits(torch.where(wanted.isfinite(), wanted, residual))


@given(st.integers(1, 3000), st.sampled_from([1, 7, 300]), st.booleans())
@settings(max_examples=15)
def test_residuals_match_the_reference(n, k, in_place):
    x, residual, k = any_bits(n, n), torch.linspace(-1, 1, n), min(n, k)
    at = torch.randperm(n)[:k].sort().values.to(torch.int32)
    values, decoded = (x + residual)[at.long()], any_bits(k, k)
    found = []
    for where in (on_triton, on_reference):
        before = residual.clone()
        kept = before if in_place else torch.ones(n)
        with where():
            count = select.not_finite(x, before, None if in_place else kept)
            select.keep(x if in_place else None, before, kept, at, values, decoded)
        found.append((count.tolist(), bits(kept)))
    assert found[0] == found[1]


@given(places(), CODINGS)
@settings(max_examples=40)
def test_positions_are_coded_as_by_the_reference(drawn, coding):
    n, at = drawn
    if n > 2**17:
        coding = "elias_fano"  # a bitmap is long
    if n > 2**22 and len(at) > 2:
        n = 2**31 - 1 if int(at[-1]) >= 2**22 else 2**22
    size = indices.Split.of(n, len(at), coding).size
    found, expected = torch.full((2, size + 8), 7, dtype=torch.uint8)
    with on_triton():
        # at odd addresses too, and nothing else is written
        indices.encode(at, n, coding, found[3 : size + 3])
        (back,) = indices.decode([found[3 : size + 3]], n, [len(at)], coding)
    with on_reference():
        indices.encode(at, n, coding, expected[3 : size + 3])
    assert torch.equal(found, expected)
    assert torch.equal(back, at)


@given(st.data(), st.integers(1, 60), st.sampled_from([1, 10, 77, 400, 70_000, 2**31 - 1]), CODINGS)
@settings(max_examples=60)
def test_any_bytes_become_positions(data, count, n, coding):
    """They are addresses; what is damaged shows in the checksum of its message."""
    count = min(count, n)
    coding = coding if n < 1000 else "elias_fano"
    size = indices.Split.of(n, count, coding).size
    content = data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size))
    coded = torch.tensor(content, dtype=torch.uint8)
    with on_triton():
        (found,) = indices.decode([coded], n, [count], coding)
    assert ((found >= 0) & (found < n)).all()


@given(st.integers(1, 5), st.sampled_from([1, 100, 3000]), st.sampled_from([1.0, 1 / 3, -2.0]))
@settings(max_examples=10)
def test_sums_of_sparse_vectors_match_the_reference(count, n, alpha):
    at = [torch.randperm(n)[: n // each].sort().values.to(torch.int32) for each in range(1, count)]
    values = [any_bits(len(each), n) for each in at]
    out, expected = torch.ones(2, n)
    for into, where in ((out, on_triton), (expected, on_reference)):
        with where():
            if at:
                scatter.scatter_add(values[0], at[0], into, alpha)
                assert bits(into) != bits(torch.ones(n))
            scatter.scatter_sum(values, at, into, alpha)
    assert bits(out) == bits(expected)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (2**31 - 1, 1500), (5000, 1700)])
def test_random_positions_are_those_of_the_reference(n, k):
    for key in ((0, 1), (2**32 - 1, 2**31)):
        expected = random_places(n, k, key, torch.device("cpu"))
        with on_triton():
            assert torch.equal(random_places(n, k, key, torch.device("cpu")), expected)


@given(st.integers(0, 150), st.integers(1, 15), st.sampled_from([1, 2, 60]))  # up to 2 blocks
@settings(max_examples=10)
def test_estimates_are_those_of_the_reference(n, rows, buckets):
    """Of any bits, also of no number: NaN is above all others, and zeros have no sign."""
    table = any_bits(rows * buckets, n).view(rows, buckets)
    table[:, ::3] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])[n % 5]
    keys = [(2**32 - 1 - row, 2**31 - 1 + row) for row in range(rows)]
    found = []
    for where in (on_triton, on_reference):
        with where():
            found.append(sketch.estimate(table, keys, n))
    assert bits(found[0]) == bits(found[1])
