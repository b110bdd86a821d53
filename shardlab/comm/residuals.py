"""Storage of the residuals of error feedback.

    fp32    4 bytes per element, exact
    bf16    2 bytes, rounded to nearest even
    int8    1 byte and 1/64 for the scales: `shardlab.codecs.integers.Int8` in groups of 128

Error feedback loses what this rounding drops, as in LoCo (Xie et al. 2024), which stores residuals
in eight bits. Magnitudes are clamped to 2**126, the largest that both narrow forms hold.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shardlab.codecs.integers import Int8
from shardlab.core.device import accelerator_of

Residual = Literal["fp32", "bf16", "int8"]

_GROUP = 128
_INT8 = Int8(_GROUP)
_LARGEST = 2.0**126
_LARGEST_SCALE = torch.tensor(_LARGEST / 127, dtype=torch.bfloat16)
"""of a group that holds `_LARGEST`; larger elements have no smaller one"""
_DTYPES: dict[Residual, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}


def blank(kind: Residual, n: int, device: torch.device) -> Tensor:
    """Return n stored zeros."""
    size = _INT8.payload_bytes(n) if kind == "int8" else n
    return torch.zeros(size, dtype=_DTYPES[kind], device=device)


def elements(stored: Tensor) -> int:
    """Return the number of elements that `stored` holds."""
    if stored.dtype != torch.uint8:
        return stored.numel()
    groups = -(-stored.numel() // (_GROUP + 2))
    return stored.numel() - 2 * groups


def widen(stored: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the elements in float32: `stored` itself if that is its dtype.

    Args:
        out: float32 [elements], written otherwise; by default a new vector.
    """
    if stored.dtype == torch.float32:
        return stored
    if out is None:
        out = torch.empty(elements(stored), dtype=torch.float32, device=stored.device)
    if stored.dtype == torch.uint8:
        _INT8.decode_sum([stored], out)
    else:
        out.copy_(stored)
    return out


def narrow(vector: Tensor, stored: Tensor) -> None:
    """Write a finite float32 vector to `stored`; clamp in `vector` what its form cannot hold."""
    if stored.dtype == torch.float32:
        stored.copy_(vector)
    elif stored.dtype == torch.uint8:
        if on_device := accelerator_of(vector.device) is not None:
            vector.clamp_(-_LARGEST, _LARGEST)  # the host would wait for a look at the scales
        _INT8.encode(vector, out=stored)
        if on_device:
            return
        # checking the scales is cheaper than a pass over all elements; NaN means too large
        scales = stored[: 2 * -(-vector.numel() // _GROUP)].view(torch.bfloat16)
        if scales.numel() and not scales.amax() < _LARGEST_SCALE:
            _INT8.encode(vector.clamp_(-_LARGEST, _LARGEST), out=stored)
    else:
        stored.copy_(vector.clamp_(-_LARGEST, _LARGEST))


def store_like(stored: Tensor, vector: Tensor) -> Tensor:
    """Return a float32 vector in the form of `stored`."""
    kind = next(kind for kind, dtype in _DTYPES.items() if dtype == stored.dtype)
    result = blank(kind, vector.numel(), vector.device)
    narrow(vector.clone(), result)
    return result


def mean(stored: Sequence[Tensor]) -> Tensor:
    """Return the mean of residuals in float32, summed in float64."""
    total = torch.zeros(elements(stored[0]), dtype=torch.float64, device=stored[0].device)
    for each in stored:
        total += widen(each)
    return (total / len(stored)).float()
