"""Inputs for tests of codecs: every size of tail, every magnitude, every special value, ties."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.kernels import native

KEY = MessageKey(seed=1, step=2, unit="block", rank=3)
SIZES = st.one_of(st.integers(0, 40), st.integers(120, 140), st.integers(1000, 1030))
ALPHAS = st.sampled_from([1.0, 0.5, -1.0, 1 / 3, 0.0, 1e-30, 0.1])
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -1.8e38, float("inf"), float("nan")]
FEW, ONE = st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=5), st.just(0)

needs_compiled = pytest.mark.skipif(not native.available(), reason="no compiled kernels")


@contextmanager
def reference() -> Iterator[None]:
    """Run the block with the PyTorch reference in place of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Run the block with this default dtype of torch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_as_reference(compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Check that kernels and reference compute the same bits; return these results."""
    with reference():
        expected = compute()
    results = compute()
    for result, reference_result in zip(results, expected, strict=True):
        assert bits(result) == bits(reference_result)
    return results


def check_thread_counts(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Check that `compute` returns the same bits on one, two and three threads."""
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([vector.view(torch.uint8) for vector in compute()])
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
        for i in draw(st.lists(st.integers(0, n - 1), max_size=4)):
            values[i] = draw(st.sampled_from(SPECIAL))
    return values


def any_bits(n: int, seed: int) -> Tensor:
    """Return float32 [n] of random bit patterns, NaN, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (n,), generator=generator)
    return patterns.to(torch.int32).view(torch.float32)


def bits(values: Tensor) -> list[int]:
    """Return bit patterns, with all NaN alike: theirs depend on the order of operands."""
    if not values.is_floating_point():
        return values.tolist()
    values = values.float()
    return values.masked_fill(values.isnan(), float("nan")).view(torch.int32).tolist()


@st.composite
def with_ties(
    draw: st.DrawFn,
    n: int | None = None,
    few: st.SearchStrategy[list[float]] = FEW,
    powers: st.SearchStrategy[int] = ONE,
) -> Tensor:
    """Draw float32 [n]: few values many times, or normal numbers of one magnitude with these."""
    n = draw(st.integers(1, 300)) if n is None else n
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    some = torch.tensor(draw(few))
    chosen = some[torch.randint(len(some), (n,), generator=generator)]
    often = torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.6, 1.0]))
    return torch.where(often, chosen, torch.randn(n, generator=generator) * 2.0 ** draw(powers))


def coded(codec: Any, x: Tensor, residual: Tensor, alpha: float = 1 / 3) -> list[Tensor]:
    """Return payload, new residual, and sums of two and of one payload of a codec."""
    new_residual, summed, added = torch.empty_like(x), torch.empty_like(x), residual.clone()
    payload = codec.encode_residual(x, residual, new_residual, KEY)
    other = codec.encode(x.flip(0), KEY._replace(rank=1))
    codec.decode_sum([payload, other], summed, alpha, [KEY, KEY._replace(rank=1)])
    codec.decode_add(payload, added, alpha, KEY)
    return [payload, new_residual, summed, added]
