"""Operators of `shardlab.codecs.kernels.adam` in PyTorch, with the same bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.kernels.random import bits_of
from shardlab.codecs.kernels.rounding import fused, square_root, stochastic_bf16, stochastic_fp16

SQUARES_BLOCK = 1 << 14
"""elements whose squares are summed to one float64"""
_LANES = 16


def adam_reference(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradients: Sequence[Tensor],
    constants: Sequence[float],
    mirror: Tensor | None,
    key: Sequence[int],
    offset: int,
) -> None:
    """Run the operator `adam` in PyTorch; arguments as of `adam_`, and the words of the key."""
    as_floats = parameter.new_tensor(constants, dtype=torch.float32)
    scale, keep, decay, weight1, beta2, weight2, root, eps, rate = as_floats
    p, m, v = parameter.float() * keep, exp_avg.float(), exp_avg_sq.float()
    g = fused(decay, p, _total(gradients) * scale) if decay else _total(gradients) * scale
    lerp = weight1 < 0.5
    m = fused(weight1 if lerp else weight1 - 1, g - m, m if lerp else g)
    v = fused(weight2 * g, g, v * beta2)
    p = p + (rate * m) / (square_root(v) / root + eps)

    numbers = torch.arange(offset, offset + len(p), device=p.device)
    chance = bits_of(numbers, key[0], (numbers >> 32) ^ key[1])
    exp_avg.copy_(m)
    exp_avg_sq.copy_(_rounded(v, exp_avg_sq.dtype, chance & 0xFFFF))
    parameter.copy_(_rounded(p, parameter.dtype, chance >> 16))
    if mirror is not None:
        mirror.copy_(p)


def squares_reference(gradients: Sequence[Tensor], scale: float, offset: int, sums: Tensor) -> None:
    """Run the operator `sum_of_squares` in PyTorch.

    Args:
        offset: of the first element in the first block.
        sums: float64 [blocks], written. Each is a sum of lanes: lane l adds every 16th element.
    """
    g = _total(gradients)
    g = (g * g.new_tensor(scale)).double()
    padded = g.new_zeros(len(sums) * SQUARES_BLOCK)
    padded[offset : offset + len(g)] = g * g
    lanes = g.new_zeros(len(sums), _LANES)
    for row in padded.view(len(sums), SQUARES_BLOCK // _LANES, _LANES).unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, 1)
        lanes = low + high
    sums.copy_(lanes[:, 0])


def _total(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    return total


def _rounded(values: Tensor, dtype: torch.dtype, chance: Tensor) -> Tensor:
    if dtype == torch.bfloat16:
        return stochastic_bf16(values, chance)
    return values if dtype == torch.float32 else stochastic_fp16(values, chance & 0x1FFF)
