"""How a residual is stored: as float32, as bfloat16 or as eight-bit integers.

    fp32    4 bytes per element, exact
    bf16    2 bytes, rounded to nearest even
    int8    1 byte and 1/64 for the scales: `shardlab.kernels.int8` in groups of 128

What rounding drops here is lost to error feedback, as in LoCo (Xie et al. 2024), which stores
residuals in eight bits. Magnitudes above 2**126, which neither narrow form can hold, are cut there.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shardlab.kernels import int8

Residual = Literal["fp32", "bf16", "int8"]

_GROUP = 128
_LARGEST = 2.0**126
_LARGEST_SCALE = torch.tensor(_LARGEST / 127, dtype=torch.bfloat16)
"""of a group that holds `_LARGEST`; larger elements have no smaller one"""
_DTYPES: dict[Residual, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}


def blank(kind: Residual, n: int, device: torch.device) -> Tensor:
    """n zeros."""
    size = int8.KERNEL.payload_bytes(n, _GROUP) if kind == "int8" else n
    return torch.zeros(size, dtype=_DTYPES[kind], device=device)


def elements(stored: Tensor) -> int:
    """How many elements `stored` holds."""
    if stored.dtype != torch.uint8:
        return stored.numel()
    groups = -(-stored.numel() // (_GROUP + 2))
    return stored.numel() - 2 * groups


def widen(stored: Tensor, out: Tensor | None = None) -> Tensor:
    """The elements in float32; `stored` itself where it is that already.

    Args:
        out: float32 [elements] to write them to otherwise; a new vector by default.
    """
    if stored.dtype == torch.float32:
        return stored
    if out is None:
        out = torch.empty(elements(stored), dtype=torch.float32, device=stored.device)
    if stored.dtype == torch.uint8:
        int8.KERNEL.decode_sum([stored], _GROUP, out)
    else:
        out.copy_(stored)
    return out


def narrow(vector: Tensor, stored: Tensor) -> None:
    """Stores a finite float32 vector; cuts off in it what the form cannot hold."""
    if stored.dtype == torch.float32:
        stored.copy_(vector)
    elif stored.dtype == torch.uint8:
        int8.KERNEL.encode(vector, _GROUP, payload=stored)
        # a look at the scales is cheaper than a pass over all elements; NaN stands for too large
        scales = stored[: 2 * -(-vector.numel() // _GROUP)].view(torch.bfloat16)
        if scales.numel() and not scales.amax() < _LARGEST_SCALE:
            int8.KERNEL.encode(vector.clamp_(-_LARGEST, _LARGEST), _GROUP, payload=stored)
    else:
        stored.copy_(vector.clamp_(-_LARGEST, _LARGEST))


def store_like(stored: Tensor, vector: Tensor) -> Tensor:
    """A float32 vector in the form of `stored`."""
    kind = next(kind for kind, dtype in _DTYPES.items() if dtype == stored.dtype)
    result = blank(kind, vector.numel(), vector.device)
    narrow(vector.clone(), result)
    return result


def mean(stored: Sequence[Tensor]) -> Tensor:
    """Of several residuals, in float32; summed in float64."""
    total = torch.zeros(elements(stored[0]), dtype=torch.float64, device=stored[0].device)
    for each in stored:
        total += widen(each)
    return (total / len(stored)).float()
