import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.kernels import select
from tests.codecs.kernels.kernel_vectors import (
    any_bits,
    bits,
    check_thread_counts,
    sorted_places,
    vectors,
    with_ties,
)

LARGE = 70_001  # larger than the vectors whose threshold is found without a sample


def by_reference(x, k, floor=0, residual=None, kept=None):
    values, places = torch.empty(k), torch.empty(k, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int64)
    select.largest_reference(x, residual, kept, floor, values, places, count)
    return values[: int(count)], places[: int(count)]


def check(x, k, floor=0):
    values, places = select.largest(x, k, floor)
    expected_values, expected_places = by_reference(x, k, floor)
    assert places.tolist() == expected_places.tolist()
    assert values.view(torch.int32).tolist() == expected_values.view(torch.int32).tolist()
    return places


@given(st.data())
def test_largest_are_selected_and_ties_go_to_the_lower_index(data):
    x = data.draw(with_ties())
    k = data.draw(st.integers(1, len(x)))
    floor = data.draw(st.sampled_from([0, 1, 0x3F800000, 0x7F800000, 0x7FFFFFFF]))
    assert check(x, k, floor).tolist() == sorted_places(x, k, floor)


@given(st.integers(0, 2**31), st.integers(1, 600), st.data())
def test_selection_orders_any_bit_pattern(seed, n, data):
    x = any_bits(n, seed)
    k = data.draw(st.integers(1, n))
    assert check(x, k).tolist() == sorted_places(x, k)


@given(vectors())
def test_all_elements_can_be_selected(x):
    assert check(x, len(x)).tolist() == list(range(len(x)))


@functools.cache
def large_vectors():
    torch.manual_seed(0)
    x = torch.randn(LARGE)
    few = torch.zeros(LARGE).masked_scatter(torch.rand(LARGE) < 0.004, x)
    spread = x * 2.0 ** torch.arange(LARGE).div(500, rounding_mode="floor")
    block = torch.cat([torch.full((900,), 5.0), x[900:]])
    nans = x.masked_fill(torch.rand(LARGE) < 0.03, float("nan"))
    return {
        "normal": x,
        "zeros": torch.zeros(LARGE),
        "equal": torch.full((LARGE,), -1.5),
        "mostly zero": few,
        "two values": x.sign(),
        "growing": spread.clamp(-1e38, 1e38),
        "ties at the threshold": block,
        "nan": nans,
        "all nan": torch.full((LARGE,), float("nan")),
        "largest pattern": torch.full((LARGE,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32),
        "many bits": any_bits(LARGE, 1),
    }


@pytest.mark.parametrize("kind", large_vectors())
@pytest.mark.parametrize("k", [1, 700, 7001, 35_000, LARGE - 1, LARGE])
@pytest.mark.parametrize("floor", [0, 0x3F800000])
def test_selection_from_a_sampled_threshold_is_exact(kind, k, floor):
    check(large_vectors()[kind], k, floor)


def test_selection_matches_torch_topk():
    x = torch.randn(LARGE)
    values, places = select.largest(x, 700)
    expected = torch.topk(x.abs(), 700)
    assert sorted(values.abs().tolist(), reverse=True) == expected.values.tolist()
    assert sorted(places.tolist()) == sorted(expected.indices.tolist())


@given(st.data())
def test_selection_adds_the_residual_and_writes_finite_sums(data):
    x = data.draw(vectors(n=data.draw(st.integers(1, 300))))
    residual = data.draw(vectors(n=len(x)))
    # the payload of a sum of two NaN depends on the order of operands
    residual[x.isnan() & residual.isnan()] = 0.0
    k = data.draw(st.integers(1, len(x)))
    kept, expected_kept = torch.empty(len(x)), torch.empty(len(x))
    values, places = select.largest(x, k, 0, residual, kept)
    expected = by_reference(x, k, 0, residual, expected_kept)
    assert bits(values) == bits(expected[0]) and places.tolist() == expected[1].tolist()
    assert bits(kept) == bits(expected_kept)
    assert select.not_finite(x, residual, kept) == int((~(x + residual).isfinite()).sum())
    assert bits(kept) == bits(expected_kept)


@given(st.data())
def test_keep_matches_reference_in_place_and_out_of_place(data):
    n = data.draw(st.sampled_from([1, 300, 1500, 5000]))
    x, residual = data.draw(vectors(n=n)), data.draw(vectors(n=n))
    k = data.draw(st.integers(0, n))
    places = torch.randperm(n)[:k].sort().values.to(torch.int32)
    values, decoded = data.draw(vectors(n=k)), data.draw(vectors(n=k))
    expected, kept = torch.empty(n), torch.empty(n)
    select.keep_reference(x, residual, expected, places, values, decoded)
    select.keep(x, residual, kept, places, values, decoded)
    assert bits(kept) == bits(expected)
    start = torch.randn(n)
    rest, expected_rest = start.clone(), start.clone()
    select.keep_reference(None, residual, expected_rest, places, values, decoded)
    select.keep(None, residual, rest, places, values, decoded)
    assert bits(rest) == bits(expected_rest)
    select.keep(x, residual, residual, places, values, decoded)
    assert bits(residual) == bits(expected)


@settings(deadline=None)
@given(st.sampled_from([0.0001, 0.01, 0.3, 1.0]), st.booleans())
def test_selection_does_not_depend_on_the_number_of_threads(density, ties):
    n = 300_001
    x, residual = torch.randn(n), torch.randn(n)
    if ties:
        x, residual = x.round(), residual.round()

    def compute():
        kept = torch.empty(n)
        values, places = select.largest(x, int(density * n), 0, residual, kept)
        select.keep(None, residual, kept, places, values, values / 2)
        return values, places, kept

    check_thread_counts(compute)


def test_unsuitable_tensors_are_refused():
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="cannot select 9 of 8"):
        select.largest(x, 9)
    with pytest.raises(ValueError, match="must be a contiguous float32 vector"):
        select.largest(x.double(), 2)
    with pytest.raises(ValueError, match="must have the length"):
        select.largest(x, 2, 0, torch.zeros(7), torch.zeros(8))
    with pytest.raises(ValueError, match="places must be"):
        select.keep(x, x, x, torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3))


def test_selections_appear_in_profiles_by_name():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        select.largest(torch.randn(64), 3)
    assert "shardlab::select_largest" in {event.key for event in profile.key_averages()}
