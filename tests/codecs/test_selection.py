"""Exact selection of the largest elements, residuals and sums of sparse vectors."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.selection import largest, scatter_add, scatter_sum, write_residual
from tests.codecs.vectors import (
    any_bits,
    bits,
    check_as_reference,
    check_thread_counts,
    vectors,
    with_ties,
)

LARGE = 70_001  # larger than the vectors whose threshold is found without a sample


def check(x, k, floor=0):
    return check_as_reference(lambda: largest(x, k, floor))[1]


def sorted_positions(x, k, floor=0):
    """Return the positions of the k largest magnitudes of at least `floor`, by a sort."""
    magnitude = (x.view(torch.int32) & 0x7FFFFFFF).tolist()
    order = sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))
    return sorted(i for i in order[:k] if magnitude[i] >= floor)


@given(st.data())
def test_largest_are_selected_and_ties_go_to_the_lower_index(data):
    any_pattern = st.builds(any_bits, st.integers(1, 600), st.integers(0, 2**31))
    x = data.draw(st.one_of(with_ties(), any_pattern))
    k = data.draw(st.integers(1, len(x)))
    floor = data.draw(st.sampled_from([0, 1, 0x3F800000, 0x7F800000, 0x7FFFFFFF]))
    assert check(x, k, floor).tolist() == sorted_positions(x, k, floor)


@functools.cache
def large_vectors():
    torch.manual_seed(0)
    x = torch.randn(LARGE)
    few = torch.zeros(LARGE).masked_scatter(torch.rand(LARGE) < 0.004, x)
    spread = x * 2.0 ** torch.arange(LARGE).div(500, rounding_mode="floor")
    block = torch.cat([torch.full((900,), 5.0), x[900:]])
    return {
        "normal": x,
        "zeros": torch.zeros(LARGE),
        "mostly zero": few,
        "two values": x.sign(),
        "growing": spread.clamp(-1e38, 1e38),
        "ties at the threshold": block,
        "nan": x.masked_fill(torch.rand(LARGE) < 0.03, float("nan")),
        "largest pattern": torch.full((LARGE,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32),
        "many bits": any_bits(LARGE, 1),
    }


@pytest.mark.parametrize("kind", large_vectors())
@pytest.mark.parametrize("k", [1, 700, 35_000, LARGE])
@pytest.mark.parametrize("floor", [0, 0x3F800000])
def test_selection_from_a_sampled_threshold_is_exact(kind, k, floor):
    check(large_vectors()[kind], k, floor)


@given(st.data())
def test_selection_adds_the_residual_and_writes_finite_sums(data):
    x = data.draw(vectors(n=data.draw(st.integers(1, 300))))
    residual = data.draw(vectors(n=len(x)))
    # the payload of a sum of two NaN depends on the order of operands
    residual[x.isnan() & residual.isnan()] = 0.0
    k = data.draw(st.integers(1, len(x)))

    def compute():
        new_residual = torch.empty(len(x))
        return [*largest(x, k, 0, residual, new_residual), new_residual]

    new_residual = check_as_reference(compute)[2]
    corrected = x + residual
    assert bits(new_residual) == bits(torch.where(corrected.isfinite(), corrected, residual))


@given(st.data())
def test_residuals_have_the_bits_of_the_reference_in_place_and_out_of_place(data):
    n = data.draw(st.sampled_from([1, 300, 1500, 5000]))
    x, residual = data.draw(vectors(n=n)), data.draw(vectors(n=n))
    k = data.draw(st.integers(0, n))
    positions = torch.randperm(n)[:k].sort().values.to(torch.int32)
    values, decoded = data.draw(vectors(n=k)), data.draw(vectors(n=k))

    def compute():
        new_residual, without_x, in_place = torch.empty(n), torch.zeros(n), residual.clone()
        write_residual(x, residual, new_residual, positions, values, decoded)
        write_residual(None, residual, without_x, positions, values, decoded)
        write_residual(x, in_place, in_place, positions, values, decoded)
        return new_residual, without_x, in_place

    new_residual, _, in_place = check_as_reference(compute)
    assert bits(new_residual) == bits(in_place)


@settings(deadline=None)
@given(st.sampled_from([0.0001, 0.01, 0.3, 1.0]), st.booleans())
def test_selection_does_not_depend_on_the_number_of_threads(density, ties):
    n = 300_001
    x, residual = torch.randn(n), torch.randn(n)
    if ties:
        x, residual = x.round(), residual.round()

    def compute():
        new_residual = torch.empty(n)
        values, positions = largest(x, int(density * n), 0, residual, new_residual)
        write_residual(None, residual, new_residual, positions, values, values / 2)
        return values, positions, new_residual

    check_thread_counts(compute)


@given(st.data(), st.integers(1, 6), st.sampled_from([1.0, 0.5, 1 / 3, -2.0]))
def test_sums_of_sparse_vectors_have_the_bits_of_the_reference(data, count, alpha):
    n = data.draw(st.sampled_from([1, 5, 4096, 9000]))
    sizes = [data.draw(st.integers(0, min(n, 300))) for _ in range(count)]
    positions = [torch.randperm(n)[:k].sort().values.to(torch.int32) for k in sizes]
    values = [data.draw(vectors(n=k)) for k in sizes]

    def compute():
        summed, added = torch.empty(n), torch.ones(n)
        scatter_sum(values, positions, summed, alpha)
        scatter_add(values[0], positions[0], added, alpha)
        return summed, added

    check_as_reference(compute)


def test_sums_of_long_vectors_depend_on_neither_alignment_nor_threads():
    n = (1 << 20) + 5
    positions = torch.arange(0, n, 3, dtype=torch.int32)
    values = torch.randn(len(positions))
    expected = torch.zeros(n)
    expected[::3] = 2 * values
    for shift in (0, 1):

        def compute(shift=shift):
            out = torch.empty(n + 1)[shift : n + shift]
            scatter_sum([values, values], [positions, positions], out)
            assert torch.equal(out, expected)
            return [out]

        check_thread_counts(compute)


def test_unsuitable_tensors_are_refused():
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="cannot select 9 of 8"):
        largest(x, 9)
    with pytest.raises(ValueError, match="must be a contiguous vector of 8"):
        largest(x.double(), 2)
    with pytest.raises(ValueError, match="positions must be a contiguous vector of 3"):
        write_residual(x, x, x, torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3))
