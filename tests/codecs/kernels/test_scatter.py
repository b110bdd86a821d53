import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.kernels import scatter
from tests.codecs.kernels.kernel_vectors import bits, check_thread_counts, vectors


@given(st.data(), st.integers(1, 6), st.sampled_from([1.0, 0.5, 1 / 3, -2.0]))
def test_sums_of_sparse_vectors_match_reference(data, count, alpha):
    n = data.draw(st.sampled_from([1, 100, 4096, 9000]))
    sizes = [data.draw(st.integers(0, n)) for _ in range(count)]
    at = [torch.randperm(n)[:size].sort().values.to(torch.int32) for size in sizes]
    values = [data.draw(vectors(n=len(place))) for place in at]
    out, expected = torch.full((n,), 7.0), torch.empty(n)
    scatter.scatter_sum(values, at, out, alpha)
    scatter.sum_reference(values, at, expected, alpha)
    assert bits(out) == bits(expected)
    scatter.scatter_add(values[0], at[0], out, alpha)
    scatter.add_reference(values[0], at[0], expected, alpha)
    assert bits(out) == bits(expected)


def test_sums_do_not_depend_on_the_number_of_threads():
    n = 300_001
    at = [torch.randperm(n)[:5000].sort().values.to(torch.int32) for _ in range(4)]
    values = [torch.randn(5000) for _ in at]

    def compute():
        out = torch.empty(n)
        scatter.scatter_sum(values, at, out, 0.3)
        return (out,)

    check_thread_counts(compute)


def test_sum_of_vectors_larger_than_caches_does_not_depend_on_alignment():
    n, memory = (1 << 20) + 3, torch.empty((1 << 20) + 4)
    at = [torch.randperm(n)[:9000].sort().values.to(torch.int32) for _ in range(2)]
    values, expected = [torch.randn(9000) for _ in at], torch.empty(n)
    scatter.sum_reference(values, at, expected, 0.3)
    for out in (memory[:n], memory[1:]):
        scatter.scatter_sum(values, at, out, 0.3)
        assert bits(out) == bits(expected)
