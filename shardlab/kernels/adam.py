"""One step of Adam or AdamW over flat vectors, in one pass: csrc/adam.cpp.

The results have the same bits as `torch.optim.AdamW(fused=True)` and
`torch.optim.Adam(fused=True)` on processors with AVX2
(torch/aten/src/ATen/native/cpu/FusedAdamKernel.cpp). Per element, in float32, where each operation
is rounded once and `fma` is one operation:

    g = (the sum of the gradients, in their order) * scale
    p = p * (1 - learning_rate * weight_decay)            decoupled (AdamW)
    g = fma(weight_decay, p, g)                           otherwise (Adam)
    m = fma(1 - beta1, g - m, m)                          beta1 > 1/2; else fma(-beta1, g - m, g)
    v = fma((1 - beta2) * g, g, v * beta2)
    p = p + (-(learning_rate / (1 - beta1^step)) * m) / (sqrt(v) / sqrt(1 - beta2^step) + eps)

Factors that depend only on the step are computed in float64 and rounded once. All elements are
computed in the same way, so that neither threads nor cuts between calls change a bit; torch rounds
the last n mod 16 elements differently.

Vectors of 16 bits are widened when they are read, and values are rounded when they are written:
* `exp_avg` and `mirror` to the nearest, ties to even, as in torch;
* `exp_avg_sq`, and a parameter of 16 bits, stochastically, which is unbiased. A step changes a
  second moment by about 1 - beta2, less than half the distance of bfloat16 numbers, so rounding to
  the nearest would never change it. The random numbers are the 32 bits of `shardlab.kernels.random`
  for element e, with the key words (k0, k1 ^ (e >> 32)) from BLAKE2b of seed and step: the lower 16
  bits for the second moment, the upper 16 for the parameter (the lowest 13 of them for float16).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.arithmetic import lane_sums, square_root
from shardlab.kernels.native import check
from shardlab.kernels.operators import kernel
from shardlab.kernels.random import bits_of
from shardlab.kernels.workers import Workers

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES = (torch.float32, torch.bfloat16)
"""Types of moments. float16 is too narrow: gradients below 5e-3 would not change the second
moment."""

_DTYPES = PARAMETER_DTYPES  # by their number in csrc/adam.cpp
SQUARES_BLOCK = 1 << 14
"""Elements whose squares are summed to one float64."""
_LANES = 16


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of Adam, with the defaults of torch.optim."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """Whether the decay is decoupled, as in AdamW (Loshchilov & Hutter 2019), or is part of the
    gradient."""

    def constants(self, step: int, scale: float) -> list[float]:
        """Return the constants of the kernel in float64, in the order of `Constants` in csrc."""
        (beta1, beta2), decay = self.betas, self.weight_decay
        return [
            scale,
            1 - self.learning_rate * decay if self.decoupled else 1.0,
            0.0 if self.decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            self.eps,
            -(self.learning_rate / (1 - beta1**step)),
        ]


@torch.no_grad()
def adam_(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradients: Sequence[Tensor],
    hyper: Hyper,
    step: int,
    scale: float = 1.0,
    mirror: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    workers: Workers | None = None,
) -> None:
    """Update parameter and moments, contiguous vectors [n], in place.

    Args:
        parameter: float32, bfloat16 or float16.
        exp_avg, exp_avg_sq: float32 or bfloat16.
        gradients: At least one vector [n], all float32, bfloat16 or float16.
        step: Number of the update, from 1.
        scale: Factor of the sum of the gradients.
        mirror: bfloat16 or float16 [n], set to the rounded parameter, which must be float32.
        seed: Seed of the stochastic rounding, besides `step` and the number of the element.
        offset: Number of the first element, below 2**63 - n.
        workers: Threads that run the kernel; by default the thread of the caller.

    Vectors must not overlap.

    Raises:
        ValueError: A vector has another type, shape or device; the message names it.
    """
    kind = parameter.numel(), parameter.device
    check("parameter", parameter, *kind, *PARAMETER_DTYPES)
    check("exp_avg", exp_avg, *kind, *MOMENT_DTYPES)
    check("exp_avg_sq", exp_avg_sq, *kind, *MOMENT_DTYPES)
    _check_gradients(gradients, parameter)
    if mirror is not None:
        check("mirror", mirror, *kind, torch.bfloat16, torch.float16)
        if parameter.dtype != torch.float32:
            raise ValueError(f"mirror: requires a parameter of float32, not {parameter.dtype}")
    if step < 1 or offset < 0:
        raise ValueError(f"step is {step}, offset {offset}: they count from 1 and from 0")
    constants, key = hyper.constants(step, scale), _key(seed, step)
    vectors = parameter, exp_avg, exp_avg_sq, list(gradients)
    if native.compiled(parameter):
        read = (*vectors[:3], gradients[0], parameter if mirror is None else mirror)
        kinds = [_DTYPES.index(vector.dtype) for vector in read]
        _ADAM(
            *(workers.handle() if workers else 0, *vectors, mirror, kinds, constants),
            *(*key, offset),
        )
    else:
        adam_reference(*vectors, constants, mirror, key, offset)


def sum_of_squares(
    gradients: Sequence[Tensor], scale: float = 1.0, offset: int = 0, workers: Workers | None = None
) -> float:
    """Return the squared norm of the gradient that `adam_` would use; NaN and infinity propagate.

    The squares of a block of `SQUARES_BLOCK` elements are summed in float64, and the sums of the
    blocks exactly. A block begins at a multiple of `SQUARES_BLOCK`, counted from `offset`, so that
    neither threads nor other elements change a bit of its sum.

    Args:
        gradients, scale, offset, workers: As for `adam_`.
    """
    _check_gradients(gradients)
    n = gradients[0].numel()
    blocks = -(-(n + offset % SQUARES_BLOCK) // SQUARES_BLOCK)
    sums = torch.empty(blocks, dtype=torch.float64)
    first = offset % SQUARES_BLOCK
    if native.compiled(gradients[0]):
        _SQUARES(
            *(workers.handle() if workers else 0, list(gradients)),
            *(_DTYPES.index(gradients[0].dtype), n, scale, first, sums),
        )
    else:
        squares_reference(gradients, scale, first, sums)
    return math.fsum(sums.tolist())


def _key(seed: int, step: int) -> list[int]:
    digest = hashlib.blake2b(f"adam\0{seed}\0{step}".encode(), digest_size=8).digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]


def _check_gradients(gradients: Sequence[Tensor], like: Tensor | None = None) -> None:
    if len({gradient.dtype for gradient in gradients}) != 1:
        raise ValueError("gradients: needs at least one, all of one dtype")
    like = gradients[0] if like is None else like
    for gradient in gradients:
        check("gradient", gradient, like.numel(), like.device, *PARAMETER_DTYPES)


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
    """Run `adam_` in PyTorch.

    Args:
        constants: Result of `Hyper.constants`.
        key: Key words of the random numbers.
    """
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
    """Write the sums of squares of blocks in PyTorch.

    Args:
        offset: Offset of the first element in the first block.
        sums: float64 [blocks], set to sums of 16 lanes (`lane_sums`).
    """
    g = _total(gradients)
    g = (g * g.new_tensor(scale)).double()
    padded = g.new_zeros(len(sums) * SQUARES_BLOCK)
    padded[offset : offset + len(g)] = g * g
    sums.copy_(lane_sums(padded.view(len(sums), SQUARES_BLOCK), _LANES)[:, 0])


def _total(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    return total


def _rounded(values: Tensor, dtype: torch.dtype, chance: Tensor) -> Tensor:
    if dtype == torch.bfloat16:
        return stochastic_bf16(values, chance)
    return values if dtype == torch.float32 else stochastic_fp16(values, chance & 0x1FFF)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 tensors, rounded once.

    float64 represents the product of two float32 exactly. The sum in float64 is rounded to odd: its
    last bit is set if it is inexact. The second rounding, to float32, then gives the same result as
    a single one.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # the exact rounding error, by Knuth's TwoSum
    rounded = total - product
    error = (product - (total - rounded)) + (addend - rounded)
    bits = total.view(torch.int64)
    inexact = total.isfinite() & (error != 0) & (bits & 1 == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def stochastic_bf16(values: Tensor, chance: Tensor) -> Tensor:
    """Round up or down to bfloat16 at random, unbiased.

    Args:
        values: float32.
        chance: Uniform random numbers, int64 in [0, 2**16), one per value.
    """
    bits = values.view(torch.int32)
    rounded = torch.where(values.isfinite(), bits + chance.to(torch.int32), bits) >> 16
    return torch.where(
        values.isnan(), values.to(torch.bfloat16), rounded.to(torch.int16).view(torch.bfloat16)
    )


def stochastic_fp16(values: Tensor, chance: Tensor) -> Tensor:
    """Round up or down to float16 at random, unbiased also for subnormal numbers.

    Above 65504 the number above is infinity.

    Args:
        values: float32.
        chance: Uniform random numbers, int64 in [0, 2**13), one per value.
    """
    magnitude = values.abs()
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=(127 - 14) << 23)
    step = (exponent - (10 << 23)).view(torch.float32)
    down = (magnitude / step + chance.to(torch.float32) * 2.0**-13).floor() * step
    finite = torch.where(values.isfinite(), down, magnitude)
    return torch.copysign(finite, values).to(torch.float16)


_ADAM = kernel(
    "adam",
    "int workers, Tensor(a!) parameter, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor[] gradients, size(gradients), Tensor(d!)? mirror, int[] kinds, size(parameter), "
    "float[] constants, int k0, int k1, int offset",
)
_SQUARES = kernel(
    "sum_of_squares",
    "int workers, Tensor[] gradients, int kind, size(gradients), int n, float scale, int offset, "
    "Tensor(a!) sums",
)
