"""Arithmetic that PyTorch lacks on float32 tensors, with the bits of the compiled kernels.

float64 holds the product of two float32 exactly. What it rounds away of a sum is kept as its last
bit (rounding to odd), so that the second rounding, to float32, has the result of a single one.
"""

import torch
from torch import Tensor


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once; float32 tensors."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Knuth's TwoSum: what rounding took away, exactly
    shown = total - product
    error = (product - (total - shown)) + (addend - shown)
    bits = total.view(torch.int64)
    inexact = total.isfinite() & (error != 0) & (bits & 1 == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def square_root(a: Tensor) -> Tensor:
    """Return the correctly rounded root: PyTorch's own of float32 is not, on some processors."""
    return a.double().sqrt().float()


def stochastic_bf16(values: Tensor, chance: Tensor) -> Tensor:
    """Round up or down to bfloat16 at random, unbiased.

    Args:
        values: float32.
        chance: int64 in [0, 2**16), one for each value, uniformly random.
    """
    bits = values.view(torch.int32)
    rounded = torch.where(values.isfinite(), bits + chance.to(torch.int32), bits) >> 16
    return torch.where(
        values.isnan(), values.to(torch.bfloat16), rounded.to(torch.int16).view(torch.bfloat16)
    )


def stochastic_fp16(values: Tensor, chance: Tensor) -> Tensor:
    """Round to float16 likewise, subnormal numbers included; above 65504 towards infinity.

    Args:
        values: float32.
        chance: int64 in [0, 2**13).
    """
    magnitude = values.abs()
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=(127 - 14) << 23)
    step = (exponent - (10 << 23)).view(torch.float32)
    down = (magnitude / step + chance * 2.0**-13).floor() * step
    finite = torch.where(values.isfinite(), down, magnitude)
    return torch.copysign(finite, values).to(torch.float16)
