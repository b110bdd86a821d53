"""Inputs for tests of kernels: every size of tail, every magnitude, every special value, ties."""

import struct
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shardlab.codecs.kernels import native

SIZES = st.one_of(st.integers(0, 40), st.integers(120, 140), st.integers(1000, 1030))
ALPHAS = st.sampled_from([1.0, 0.5, -1.0, 1 / 3, 0.0, 1e-30, 0.1])
GROUPS = st.sampled_from([8, 16, 128, 1000, 4096])
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -1.8e38, float("inf"), float("nan")]
FEW = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38, float("inf"), -float("inf"), float("nan")]

needs_compiled = pytest.mark.skipif(not native.available(), reason="no compiled kernels")


def check_thread_counts(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Check that `compute` returns the same bits on one, two and three threads."""
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([each.view(torch.uint8) for each in compute()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@st.composite
def vectors(draw: st.DrawFn, n: int | None = None, specials: bool = True) -> Tensor:
    """Draw float32 [n]: normal numbers of one magnitude, some replaced by special values."""
    n = draw(SIZES) if n is None else n
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(n, generator=generator) * 2.0 ** draw(st.integers(-149, 120))
    if n and specials:
        where = draw(st.lists(st.integers(0, n - 1), max_size=4))
        for i in where:
            values[i] = draw(st.sampled_from(SPECIAL))
    return values


def any_bits(n: int, seed: int) -> Tensor:
    """Return float32 [n] of random bit patterns, NaN, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )


def bits(values: Tensor) -> list[int]:
    """Return bit patterns, with all NaN alike: theirs depend on the order of operands."""
    return values.masked_fill(values.isnan(), float("nan")).view(torch.int32).tolist()


def from_bits(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


@st.composite
def with_ties(draw: st.DrawFn, n: int | None = None) -> Tensor:
    """Draw float32 [n]: few values many times, or normal numbers with some of these."""
    n = draw(st.integers(1, 300)) if n is None else n
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    some = torch.tensor(draw(st.lists(st.sampled_from(FEW), min_size=1, max_size=5)))
    chosen = some[torch.randint(len(some), (n,), generator=generator)]
    often = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.6, 1.0]))
    return torch.where(often, chosen, torch.randn(n, generator=generator))


def sorted_places(x: Tensor, k: int, floor: int = 0) -> list[int]:
    """Return the positions of the k largest magnitudes of at least `floor`, by a sort."""
    magnitude = (x.view(torch.int32) & 0x7FFFFFFF).tolist()
    order = sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))
    return sorted(i for i in order[:k] if magnitude[i] >= floor)


@st.composite
def places(draw: st.DrawFn) -> tuple[int, Tensor]:
    """Draw n and positions below it: sparse or dense, with short and with long gaps."""
    n = draw(st.sampled_from([1, 5, 8, 9, 300, 4096, 70_000, 2**21 + 70, 2**31 - 1]))
    count = draw(st.integers(0, min(n, 400)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = max(1, int(n * draw(st.sampled_from([1.0, 0.1, 0.001]))))
    start = draw(st.integers(0, n - width))
    drawn = torch.randint(start, start + width, (count,), generator=generator)
    ends = torch.tensor(draw(st.lists(st.sampled_from([0, n - 1]), max_size=2)), dtype=torch.int64)
    return n, torch.cat([drawn, ends]).unique().to(torch.int32)
