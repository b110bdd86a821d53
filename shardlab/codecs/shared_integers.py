"""Integers with scales that all ranks share, so that sums need no decoding: `int8-shared`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod
from shardlab.core.errors import UserError

_MAX_INT8 = 127


class SharedInt8(MultiPhaseMethod):
    """Eight-bit integers that the process group sums, with one scale per group of elements.

    1. m = maximum over ranks of the largest magnitude of each group: an all-reduce of maxima.
    2. Every rank encodes round(x / s) with the step s = m / R, where R = 127 // W for W ranks.
    3. The backend's all-reduce or reduce-scatter sums these integers; the sums fit into int8.

    The result is s times the sum of integers, with no rounding after the sum. Deterministic. The
    error of each rank is at most s / 2 = m / (2 R) per element, so the error of the sum is at most
    W m / (2 R): it grows with W squared, where the error of `int8` by all-to-all grows with W.
    Bits per element: 8 for the integers and 32 / group for the maxima, each as an all-reduce. The
    host reads no values, so it does not wait for a device.

    Source: block floating point with the largest exponent of all workers, which leaves room for
    their sum (Sapio et al. 2021, SwitchML), with 8 bits in place of 32.

    Args:
        group: elements that share a scale.
    """

    name = "int8-shared"

    def __init__(self, group: int = 128) -> None:
        super().__init__()
        self.group = group

    def reduce_scatter(  # noqa: D102
        self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey
    ) -> Tensor:
        codes, steps = self._quantize(vector, comm)
        return comm.reduce_scatter(codes).float() * steps.view(comm.world_size, -1)[comm.rank]

    def all_reduce(self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        codes, steps = self._quantize(vector, comm)
        comm.all_reduce(codes)
        return codes.float() * steps

    def _quantize(self, vector: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
        """Quantize with scales that all ranks share; subtract what is sent from `vector`.

        Returns:
            codes, int8 [n], and their steps, float32 [n]: NaN if a value on any rank is not finite.
        """
        levels = _MAX_INT8 // comm.world_size
        if levels == 0:
            raise UserError(
                f"int8-shared: sums over {comm.world_size} ranks do not fit into 8 bits: use int8"
            )
        n = vector.numel()
        groups = pad(vector, (0, -n % self.group)).view(-1, self.group)
        # infinity in place of NaN, since a maximum over ranks may ignore a NaN
        maxima = groups.abs().amax(1).nan_to_num(nan=float("inf"), posinf=float("inf"))
        comm.all_reduce_max(maxima)
        scales = (maxima / levels).repeat_interleave(self.group)[:n]
        steps = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
        codes = (vector / steps).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-levels, levels)
        vector.sub_(codes * steps)
        return codes.to(torch.int8), torch.where(maxima.isinf().any(), float("nan"), steps)
