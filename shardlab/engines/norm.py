"""The global norm of gradients, with the same bits in all engines.

Squares are summed in float64, over whatever parts an engine holds, and the norm is rounded once.
Clipping is that of `torch.nn.utils.clip_grads_with_norm_`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of the elements of all tensors; float64, on their device."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def norm_of(squares: Tensor | float) -> float:
    """The norm, as float32 can hold it."""
    return float(torch.as_tensor(squares, dtype=torch.float64).sqrt().float())


def clip_coefficient(norm: float, limit: float | None) -> float:
    """What gradients of this norm are multiplied by, in float32."""
    if limit is None or math.isnan(norm):
        return 1.0
    return float((limit / (torch.tensor(norm) + 1e-6)).clamp(max=1.0))
