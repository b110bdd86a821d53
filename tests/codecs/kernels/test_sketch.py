"""Count sketches: compiled kernels match the reference, and tables are linear."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.codecs.kernels import sketch
from tests.codecs.kernels.kernel_vectors import bits, check_thread_counts, vectors


def keys_of(rows):
    return [(0x9E3779B9 * row & 0xFFFFFFFF, 7 * row + 1) for row in range(rows)]


def flat(keys):
    return [word for key in keys for word in key]


@given(x=vectors(), rows=st.integers(1, 15), buckets=st.integers(1, 300))
@settings(max_examples=60)
def test_add_matches_reference(x, rows, buckets):
    ours, theirs = torch.ones(rows, buckets), torch.ones(rows, buckets)
    sketch.add(x, keys_of(rows), ours)
    sketch.add_reference(x, flat(keys_of(rows)), theirs)
    assert bits(ours) == bits(theirs)


@given(x=vectors(specials=False), rows=st.integers(1, 15), buckets=st.integers(1, 300))
@settings(max_examples=60)
def test_estimates_match_reference(x, rows, buckets):
    table = torch.zeros(rows, buckets)
    sketch.add(x, keys_of(rows), table)
    ours = sketch.estimate(table, keys_of(rows), x.numel())
    theirs = torch.empty_like(x)
    sketch.estimate_reference(table, flat(keys_of(rows)), theirs)
    assert bits(ours) == bits(theirs)


@given(seed=st.integers(0, 2**31), n=st.integers(1, 2000))
@settings(max_examples=30)
def test_sketch_is_linear(seed, n):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-1000, 1000, (n,), generator=generator).float() for _ in range(2))
    tables = []
    for vectors_in_it in ([x], [y], [x, y], [x + y]):
        table = torch.zeros(3, 50)
        for vector in vectors_in_it:
            sketch.add(vector, keys_of(3), table)
        tables.append(table)
    assert torch.equal(tables[0] + tables[1], tables[3])
    assert torch.equal(tables[2], tables[3])


def test_table_does_not_depend_on_the_number_of_threads():
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(1))

    def compute():
        table = torch.zeros(5, 4000)
        sketch.add(x, keys_of(5), table)
        return (table,)

    check_thread_counts(compute)


def test_elements_spread_evenly_over_buckets_and_signs():
    n, buckets = 200_000, 100
    counts, signs = torch.zeros(2, buckets), torch.zeros(2, buckets)
    sketch.add(torch.ones(n), keys_of(2), signs)
    sketch.add_reference(torch.ones(n), flat(keys_of(2)), counts)
    assert torch.equal(signs, counts)
    # a bucket of 2000 elements with random signs has a sum of variance 2000
    assert 0.8 < float(signs.square().mean()) / (n / buckets) < 1.25


def test_estimate_of_a_dominant_element_is_accurate():
    x = 1e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    x[1234] = -7.0
    table = torch.zeros(5, 100)
    sketch.add(x, keys_of(5), table)
    estimates = sketch.estimate(table, keys_of(5), 5000)
    assert int(estimates.abs().argmax()) == 1234
    assert abs(float(estimates[1234]) + 7.0) < 0.05


@pytest.mark.parametrize("shape", [(16, 10), (2, 10), (3, 0)])
def test_table_that_does_not_fit_its_keys_is_refused(shape):
    with pytest.raises(ValueError, match="does not fit"):
        sketch.add(torch.ones(5), keys_of(16 if shape[0] == 16 else 3), torch.zeros(shape))
