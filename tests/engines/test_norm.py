"""The norm of a gradient is a number of the gradient, not of the parts that an engine holds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.engines.common.numerics import norm_of, sum_of_squares
from shardlab.kernels import native


def exact(values):
    """The norm in float32: squares of float32 have no error in float64, and `fsum` adds none."""
    squares = math.fsum((values.double() ** 2).flatten().tolist())
    return float(torch.tensor(math.sqrt(squares), dtype=torch.float32))


@given(
    st.integers(0, 70_000),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 70_000), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_norm_does_not_depend_on_cuts(n, seed, cuts, dtype):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 4, (n,), generator=generator)
    values = (torch.randn(n, generator=generator) * 2.0**powers).to(dtype)
    parts = list(values.tensor_split(sorted(min(cut, n) for cut in cuts)))
    assert norm_of(sum_of_squares(parts)) == exact(values)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(torch.randn(60, 50).t(), id="transposed"),
        pytest.param(torch.randn(60, 50)[:, ::2], id="strided"),
        pytest.param(torch.randn(60, 50, dtype=torch.float64).float().double(), id="float64"),
    ],
)
def test_what_the_kernel_does_not_take_counts_as_well(odd):
    plain = torch.randn(20_000)
    both = torch.cat([plain.double(), odd.double().flatten()])
    assert norm_of(sum_of_squares([plain, odd])) == exact(both)


def test_without_kernels_the_norm_is_the_same(monkeypatch):
    values = torch.randn(200, 300)
    compiled = norm_of(sum_of_squares([values]))
    monkeypatch.setattr(native, "library", lambda: None)
    assert norm_of(sum_of_squares([values])) == compiled


@pytest.mark.parametrize("size", [2, 20_000])
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_number_that_is_not_finite_makes_the_norm_as_bad(bad, size):
    gradients = [torch.ones(20_000), torch.ones(9), torch.full((size,), float(bad))]
    assert str(norm_of(sum_of_squares(gradients))) == bad
