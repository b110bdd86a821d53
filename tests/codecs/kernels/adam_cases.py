"""Steps of Adam that all ways to compute it must agree on."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.codecs.kernels.adam import Hyper, adam_
from shardlab.codecs.kernels.workers import Workers
from tests.codecs.kernels.kernel_vectors import any_bits, bits

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DECAYING = Hyper(1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """Arguments of `adam_`, with the values of its vectors drawn from the seed."""

    n: int
    seed: int = 0
    wild: bool = False
    """any bits, not normal numbers"""
    dtypes: tuple[torch.dtype, ...] = (FP32, FP32, FP32, FP32)
    """of the parameter, its moments and the gradients"""
    ranks: int = 1
    mirror: torch.dtype | None = None
    hyper: Hyper = DECAYING
    step: int = 3
    scale: float = 1.0
    offset: int = 0
    shift: int = 0
    """elements by which all vectors are off their alignment"""

    def vectors(self) -> list[Tensor]:
        """Parameter, moments, gradients, mirror."""
        generator = torch.Generator().manual_seed(self.seed)
        kinds = [*self.dtypes[:3], *[self.dtypes[3]] * self.ranks, self.mirror or FP32]
        made = []
        for place, dtype in enumerate(kinds):
            values = torch.randn(self.n, generator=generator)
            if self.wild:
                values = any_bits(self.n, self.seed + place)
            if place == 2:
                values = values.abs()
            room = torch.zeros(self.n + self.shift + place, dtype=dtype)
            room[self.shift + place :] = values
            made.append(room[self.shift + place :])
        return made


def stepped(
    case: Case, workers: Workers | None = None, cuts: list[int] | None = None
) -> list[list[int]]:
    """Bits of all vectors after the step, made in calls for the parts between the cuts."""
    *vectors, mirror = case.vectors()
    has_mirror = case.mirror is not None and case.dtypes[0] is FP32
    ends = sorted({0, case.n, *(min(cut, case.n) for cut in cuts or [])})
    for start, stop in itertools.pairwise(ends):
        parameter, first, second, *gradients = (vector[start:stop] for vector in vectors)
        adam_(
            *(parameter, first, second, gradients, case.hyper, case.step, case.scale),
            mirror=mirror[start:stop] if has_mirror else None,
            seed=case.seed,
            offset=case.offset + start,
            workers=workers,
        )
    return [numbers(vector) for vector in (*vectors, mirror)]


def numbers(vector: Tensor) -> list[int]:
    """Bit patterns of the values, all NaN alike."""
    return bits(vector.float())
