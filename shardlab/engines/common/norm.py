"""The global norm of gradients, with the same bits in all engines.

Squares are summed in float64, over whatever parts an engine holds, and the norm is rounded once.
How gradients are cut therefore shows only where the exact norm lies next to the middle of two
numbers of float32. With compiled kernels a partial sum is of 2**14 squares at most and off by less
than 2**-39 of itself, the norm by half of that: two engines differ in its last bit less than once
in 2**15 steps, even if all errors were as large as they can be.

Clipping is that of `torch.nn.utils.clip_grads_with_norm_`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.kernels import adam, native

_LARGE = 1 << 14
"""elements; smaller tensors PyTorch takes faster, many in one call"""


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of the elements of all tensors; float64, on their device."""
    large = [tensor for tensor in tensors if _is_for_kernel(tensor)]
    others = [tensor for tensor in tensors if not _is_for_kernel(tensor)]
    sums = [adam.sum_of_squares([tensor.view(-1)]) for tensor in large]
    total = torch.tensor(math.fsum(sums), dtype=torch.float64)
    if others:
        norms = torch._foreach_norm(others, 2, dtype=torch.float64)
        total = total + torch.stack(norms).square().sum()
    return total


def _is_for_kernel(tensor: Tensor) -> bool:
    supported = tensor.dtype in adam.PARAMETER_DTYPES and tensor.is_contiguous()
    return supported and tensor.numel() >= _LARGE and native.compiled(tensor)


def norm_of(squares: Tensor | float) -> float:
    """The norm, as float32 can hold it."""
    return float(torch.as_tensor(squares, dtype=torch.float64).sqrt().float())


def clip_coefficient(norm: float, limit: float | None) -> float:
    """What gradients of this norm are multiplied by, in float32."""
    if limit is None or math.isnan(norm):
        return 1.0
    return float((limit / (torch.tensor(norm) + 1e-6)).clamp(max=1.0))
