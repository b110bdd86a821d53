import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.kernels import scatter
from tests.kernels.kernel_vectors import bits, vectors


@given(st.data(), st.integers(1, 6), st.sampled_from([1.0, 0.5, 1 / 3, -2.0]))
def test_sums_of_sparse_vectors_equal_the_reference(data, count, alpha):
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


def test_any_number_of_threads_sums_the_same():
    n, results, before = 300_001, [], torch.get_num_threads()
    at = [torch.randperm(n)[:5000].sort().values.to(torch.int32) for _ in range(4)]
    values = [torch.randn(5000) for _ in at]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.empty(n)
            scatter.scatter_sum(values, at, out, 0.3)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_vectors_that_no_cache_holds_are_summed_alike_wherever_they_start():
    n, memory = (1 << 20) + 3, torch.empty((1 << 20) + 4)
    at = [torch.randperm(n)[:9000].sort().values.to(torch.int32) for _ in range(2)]
    values, expected = [torch.randn(9000) for _ in at], torch.empty(n)
    scatter.sum_reference(values, at, expected, 0.3)
    for out in (memory[:n], memory[1:]):
        scatter.scatter_sum(values, at, out, 0.3)
        assert bits(out) == bits(expected)
