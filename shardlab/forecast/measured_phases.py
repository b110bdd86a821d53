"""Costs of multi-phase methods: their computation on this rank, and the messages they send."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.codecs.unit import Block, Unit
from shardlab.config.calibration_record import Operation, PhasedOperation
from shardlab.config.codec_table import find, split_text
from shardlab.forecast.measured_costs import ELEMENTS, interleave

_MATRICES = 16
"""of the vectors that show what a further matrix costs"""
_SMALLEST = 1 << 10
"""elements of a matrix"""
_FIRST, _ORDINARY = 0, 1
"""steps: a method may send the first uncompressed, and learn from it"""


class LocalCommunicator:
    """`Communicator` that records what would be sent, and sends nothing: other ranks have the same
    vectors in its place.

    What a rank computes to sum what it receives is left in, as `GroupCommunicator` does it on gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.messages: list[tuple[Operation, int]] = []
        """operation and bytes of the whole vector"""

    def sum(self, vector: Tensor) -> None:
        """Record an all-reduce."""
        self.messages.append(("all_reduce", vector.nbytes))

    def largest(self, vector: Tensor) -> None:
        """Record an all-reduce of maxima."""
        self.messages.append(("all_reduce", vector.nbytes))

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """Record a reduce-scatter; return W times the own chunk."""
        self.messages.append(("reduce_scatter", vector.nbytes))
        own = vector.chunk(self.world_size)[self.rank]
        total = own.clone()
        for _ in range(self.world_size - 1):
            total += own
        return total

    def gather(self, shard: Tensor) -> Tensor:
        """Record an all-gather; return the shard W times."""
        self.messages.append(("gather", self.world_size * shard.nbytes))
        return shard.repeat(self.world_size)

    def uncompressed(self, reason: str) -> None:
        """Do nothing: what is sent uncompressed is recorded as any message."""


def phased_times(
    codecs: list[tuple[str, bool]], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return computation and messages of one vector on this rank, by codec, collective and size."""
    found = []
    for spec, feedback in codecs:
        for elements, matrices in _sizes(spec):
            unit = unit_of(elements, matrices)
            vectors = {
                operation: Vector(spec, feedback, unit, operation, group)
                for operation in ("reduce_scatter", "all_reduce")
            }
            calls = {name: vector.reduce for name, vector in vectors.items()}
            times = interleave(calls, repetitions, group)
            found += [
                {
                    "codec": spec,
                    "error_feedback": feedback,
                    "operation": name,
                    "elements": elements,
                    "matrices": matrices,
                    "messages": [
                        {"operation": operation, "nbytes": nbytes}
                        for operation, nbytes in vector.messages
                    ],
                    "seconds": times[name],
                }
                for name, vector in vectors.items()
            ]
    return found


def _sizes(codec: str) -> list[tuple[int, int]]:
    """Return elements and matrices of the vectors to measure."""
    single, spec = [(n, 1) for n in ELEMENTS], find(split_text(codec)["name"])
    if spec is None or not spec.needs_matrices:
        return single
    return single + [(n, _MATRICES) for n in ELEMENTS if n >= _MATRICES * _SMALLEST]


def unit_of(elements: int, matrices: int) -> Unit:
    """Return a unit of equal, nearly square matrices."""
    each = elements // matrices
    rows = next(n for n in range(math.isqrt(each), 0, -1) if each % n == 0)
    blocks = (Block(f"matrix{n}", rows, each // rows) for n in range(matrices))
    return Unit("unit", tuple(blocks))


class Vector:
    """A vector that is reduced again and again, in an ordinary step of its method."""

    def __init__(
        self,
        spec: str,
        feedback: bool,
        unit: Unit,
        operation: PhasedOperation,
        group: dist.ProcessGroup,
    ) -> None:
        method = make_method(spec)
        assert isinstance(method, MultiPhaseMethod), "codecs of one payload are measured by it"
        self._feedback, self._group, self._unit = feedback, group, unit
        scattered = operation == "reduce_scatter"
        self._reduce = method.sum_scatter if scattered else method.sum
        ranks = dist.get_world_size(group) if scattered else 1
        n = ranks * sum(unit.chunk_sizes(ranks))
        self._vector, self._residual = torch.randn(n) * 1e-3, torch.zeros(n)
        self._run(_FIRST)
        self.reduce()

    def reduce(self) -> None:
        """Reduce the vector and keep what was not sent."""
        self.messages = self._run(_ORDINARY)

    def _run(self, step: int) -> list[tuple[Operation, int]]:
        wire = LocalCommunicator(self._group)
        given = self._vector + self._residual if self._feedback else self._vector.clone()
        self._reduce(given, self._unit, wire, MessageKey(0, step, self._unit.name, wire.rank))
        if self._feedback:
            self._residual.copy_(given)
        return wire.messages
