"""Vectors for selections: ties, zeros and values that are not finite among ordinary numbers."""

import torch
from hypothesis import strategies as st
from torch import Tensor

FEW = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38, float("inf"), -float("inf"), float("nan")]


@st.composite
def with_ties(draw: st.DrawFn, n: int | None = None) -> Tensor:
    """float32 [n]: a few values many times, or normal numbers with a few of these among them."""
    n = draw(st.integers(1, 300)) if n is None else n
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    some = torch.tensor(draw(st.lists(st.sampled_from(FEW), min_size=1, max_size=5)))
    chosen = some[torch.randint(len(some), (n,), generator=generator)]
    often = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.6, 1.0]))
    return torch.where(often, chosen, torch.randn(n, generator=generator))


def sorted_places(x: Tensor, k: int, floor: int = 0) -> list[int]:
    """Of the k largest magnitudes of at least `floor`, by a sort: what the kernels must select."""
    magnitude = (x.view(torch.int32) & 0x7FFFFFFF).tolist()
    order = sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))
    return sorted(i for i in order[:k] if magnitude[i] >= floor)


@st.composite
def places(draw: st.DrawFn) -> tuple[int, Tensor]:
    """n, and places below it: sparse or dense, with short and with long gaps."""
    n = draw(st.sampled_from([1, 5, 8, 9, 300, 4096, 70_000, 2**21 + 70, 2**31 - 1]))
    count = draw(st.integers(0, min(n, 400)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = max(1, int(n * draw(st.sampled_from([1.0, 0.1, 0.001]))))
    start = draw(st.integers(0, n - width))
    drawn = torch.randint(start, start + width, (count,), generator=generator)
    ends = torch.tensor(draw(st.lists(st.sampled_from([0, n - 1]), max_size=2)), dtype=torch.int64)
    return n, torch.cat([drawn, ends]).unique().to(torch.int32)
