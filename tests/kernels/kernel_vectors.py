"""Vectors that kernels must agree on: every size of tail, every magnitude, every special value."""

import struct

import torch
from hypothesis import strategies as st
from torch import Tensor

SIZES = st.one_of(st.integers(0, 40), st.integers(120, 140), st.integers(1000, 1030))
ALPHAS = st.sampled_from([1.0, 0.5, -1.0, 1 / 3, 0.0, 1e-30, 0.1])
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -1.8e38, float("inf"), float("nan")]


@st.composite
def vectors(draw: st.DrawFn, n: int | None = None, specials: bool = True) -> Tensor:
    """float32 [n]: normal numbers of one magnitude, some of them replaced by special values."""
    n = draw(SIZES) if n is None else n
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(n, generator=generator) * 2.0 ** draw(st.integers(-149, 120))
    if n and specials:
        where = draw(st.lists(st.integers(0, n - 1), max_size=4))
        for i in where:
            values[i] = draw(st.sampled_from(SPECIAL))
    return values


def any_bits(n: int, seed: int) -> Tensor:
    """float32 [n] of uniformly random bit patterns: NaN, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )


def bits(values: Tensor) -> list[int]:
    """Bit patterns, with all NaN alike: their sign and payload depend on the order of operands."""
    return values.masked_fill(values.isnan(), float("nan")).view(torch.int32).tolist()


def from_bits(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]
