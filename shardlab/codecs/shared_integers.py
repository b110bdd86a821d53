"""Integers with scales that all ranks share, which can be summed as they are: `int8-shared`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod
from shardlab.core.errors import UserError

_LARGEST = 127


class SharedInt8(MultiPhaseMethod):
    """Eight-bit integers that the group's own collective sums, of one scale per group of elements.

    1. m = maximum over ranks of the largest magnitude of each group: an all-reduce of maxima;
    2. every rank sends round(x / s) with the step s = m / R and R = 127 // W of W ranks;
    3. sums of these fit into int8 and ride the backend's all-reduce or reduce-scatter.

    The result is s times the sum of integers, with no rounding after the sum. Deterministic; the
    error of each rank is at most s / 2 = m / (2 R) per element, so W / (2 R) times m for the sum:
    it grows with W squared, where `int8` by all-to-all grows with W. Bits per element: 8 and
    32 / group, of an all-reduce in both phases. Nothing of a value is read by the host.

    Source: block floating point with the largest exponent of all workers, which leaves room for
    their sum (Sapio et al. 2021, SwitchML), with 8 bits in place of 32.

    Args:
        group: elements that share a scale.
    """

    name = "int8-shared"

    def __init__(self, group: int = 128) -> None:
        super().__init__()
        self.group = group

    def sum_scatter(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        codes, steps = self._encode(given, wire)
        return wire.sum_scatter(codes).float() * steps.view(wire.world_size, -1)[wire.rank]

    def sum(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        codes, steps = self._encode(given, wire)
        wire.sum(codes)
        return codes.float() * steps

    def _encode(self, given: Tensor, wire: Communicator) -> tuple[Tensor, Tensor]:
        """Agree on the scales, and leave in `given` what the integers lack.

        Returns:
            codes, int8, and the step of each, float32: NaN if a number on some rank is not finite.
        """
        levels = _LARGEST // wire.world_size
        if levels == 0:
            raise UserError(
                f"int8-shared: sums over {wire.world_size} ranks do not fit into 8 bits: use int8"
            )
        n = given.numel()
        groups = pad(given, (0, -n % self.group)).view(-1, self.group)
        # a NaN is no maximum, and an infinity is one
        maxima = groups.abs().amax(1).nan_to_num(nan=float("inf"), posinf=float("inf"))
        wire.largest(maxima)
        scales = (maxima / levels).repeat_interleave(self.group)[:n]
        steps = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
        codes = (given / steps).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-levels, levels)
        given.sub_(codes * steps)
        return codes.to(torch.int8), torch.where(maxima.isinf().any(), float("nan"), steps)
