"""The loss scale, and the global norm of gradients.

The norm has the same bits in all engines: squares are summed in float64, over whatever parts an
engine holds, and the norm is rounded once. How gradients are cut therefore shows only where the
exact norm lies next to the middle of two numbers of float32. With compiled kernels a partial sum is
of 2**14 squares at most and off by less than 2**-39 of itself, the norm by half of that: two
engines differ in its last bit less than once in 2**15 steps, even if all errors were as large as
they can be.

Clipping is that of `torch.nn.utils.clip_grads_with_norm_`.
"""

import math
from collections.abc import Iterable
from ctypes import c_float

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.kernels import adam, native

_LARGE = 1 << 14
"""elements; smaller tensors PyTorch takes faster, many in one call"""


class LossScale:
    """Factor of the loss: halved when a gradient is not finite, doubled after many finite ones.

    The rule and constants of Micikevicius et al. 2018 (section 3.2) as in `torch.amp.GradScaler`.
    The ranks stay alike because all of them see the same global norm.

    Args:
        active: whether the factor is another than 1.
    """

    _CALM = 2000
    """steps in a row"""

    def __init__(self, active: bool) -> None:
        self._active = active
        self.value = 2.0**16 if active else 1.0
        self._calm = 0

    def update(self, finite: bool) -> None:
        """Adapt the factor after a step whose gradients were finite or not."""
        if not self._active:
            return
        self._calm = self._calm + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._calm == self._CALM:
            self.value, self._calm = self.value * 2, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return scale and finite steps; empty when not active."""
        if not self._active:
            return {}
        return {"loss_scale": torch.tensor([self.value, self._calm], dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        if self._active:
            value, calm = state["loss_scale"].tolist()
            self.value, self._calm = value, int(calm)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that this rank holds."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of all elements; float64, on their device."""
    large = [tensor for tensor in tensors if _is_for_kernel(tensor)]
    others = [tensor for tensor in tensors if not _is_for_kernel(tensor)]
    sums = [adam.sum_of_squares([tensor.view(-1)]) for tensor in large]
    total = torch.tensor(math.fsum(sums), dtype=torch.float64)
    if not others:
        return total
    norms = torch.stack(torch._foreach_norm(others, 2, dtype=torch.float64))
    squares = norms.dot(norms)
    return squares + total if large else squares


def _is_for_kernel(tensor: Tensor) -> bool:
    supported = tensor.dtype in adam.PARAMETER_DTYPES and tensor.is_contiguous()
    return supported and tensor.numel() >= _LARGE and native.compiled(tensor)


def norm_of(squares: float) -> float:
    """Return the norm, rounded to float32, of a sum of squares."""
    return c_float(math.sqrt(squares)).value


def read_together(*numbers: Tensor) -> list[float]:
    """Return numbers, [] each, by one read: the host waits once for the device."""
    device = numbers[-1].device
    # of several types: the widest one holds all of them exactly
    values: list[float] = torch.stack([number.to(device) for number in numbers]).tolist()
    return values


def clip_coefficient(norm: float, limit: float | None) -> float:
    """Return what gradients of this norm are multiplied by, in float32."""
    if limit is None or math.isnan(norm):
        return 1.0
    return float((limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).clamp(max=1.0))
