"""Costs of codecs, multi-phase methods and memory operations, while all ranks do the same."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.adam import Hyper, adam_
from shardlab.codecs.base import Block, MessageKey, Unit
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method
from shardlab.codecs.workers import Workers
from shardlab.config.calibration_record import (
    UPDATE_BYTES,
    MemoryOperation,
    Operation,
    PhasedOperation,
)
from shardlab.config.codec_table import CODECS, codec_text, split_text
from shardlab.config.schema import Space
from shardlab.config.strategy import Strategy

ELEMENTS = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
"""of a message"""
_VECTORS = [4 * n for n in ELEMENTS]
"""elements of the float32 vectors that memory operations move"""

Times = dict[str, list[float]]


def codecs_of(strategies: Iterable[Strategy], space: Space) -> list[tuple[str, bool]]:
    """Return each codec once that a strategy has or the search may propose, and whether error
    feedback wraps it."""
    full = list(strategies)
    gradients = [*(strategy.gradients for strategy in full), *space.gradients]
    gathered = [strategy.weights.codec for strategy in full if strategy.weights is not None]
    used = dict.fromkeys(
        [
            *((each.codec, each.error_feedback) for each in gradients),
            *((each.between_nodes, each.error_feedback) for each in gradients),
            *((codec, False) for codec in (*gathered, *space.weights)),
        ]
    )
    return [
        (codec_text(codec), feedback)
        for codec, feedback in used
        if codec is not None and codec.name != "none"
    ]


def codec_times(
    codecs: Iterable[tuple[str, bool]], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs of one message on this rank, by codec and size."""
    return [
        {"codec": spec, "error_feedback": feedback, "elements": elements}
        | _message_times(spec, feedback, elements, repetitions, group)
        for spec, feedback in codecs
        for elements in ELEMENTS
    ]


def _message_times(
    spec: str, feedback: bool, n: int, repetitions: int, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Encode and decode a message again and again; its size may differ each time."""
    codec, key = make_codec(spec), MessageKey(0, 0, "unit", 0)
    vector, out, residual = torch.randn(n) * 1e-3, *torch.zeros(2, n)
    payload = torch.empty(codec.payload_bytes(n), dtype=torch.uint8)
    sizes: list[int] = []

    def encode() -> None:
        if feedback:
            sent = codec.encode_residual(vector, residual, residual, key, payload)
        else:
            sent = codec.encode(vector, key, payload)
        sizes.append(sent.numel())

    def decode() -> None:
        codec.decode_sum([payload[: sizes[-1]]], out, 1.0, [key])

    encode()
    times = interleave({"encode_s": encode, "decode_s": decode}, repetitions, group)
    return {"payload_bytes": statistics.fmean(sizes), "variable": codec.variable, **times}


def memory_times(
    operations: Sequence[MemoryOperation], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs of memory operations on this rank."""
    rows = []
    for n in _VECTORS:
        calls = _memory_calls(n)
        times = interleave({name: calls[name] for name in operations}, repetitions, group)
        sizes = {"copy": 4 * n, "update": UPDATE_BYTES * n}
        rows += [
            {"operation": name, "nbytes": sizes[name], "seconds": seconds}
            for name, seconds in times.items()
        ]
    return rows


def _memory_calls(n: int) -> Mapping[str, Callable[[], object]]:
    source, target = torch.ones(n), torch.ones(n)
    parameter, exp_avg, exp_avg_sq, gradient = torch.zeros(4, n)
    threads = torch.get_num_threads()
    workers = Workers(threads) if threads > 1 else None
    moments, hyper = (exp_avg, exp_avg_sq), Hyper(1e-3)
    return {
        "copy": lambda: target.copy_(source),
        "update": lambda: adam_(parameter, *moments, [gradient], hyper, 1, workers=workers),
    }


def interleave(
    calls: Mapping[str, Callable[[], object]],
    repetitions: int,
    group: dist.ProcessGroup,
    pause: float = 0.0,
) -> Times:
    """Return the seconds of this rank in each repetition, after one that allocates and connects."""
    times: Times = {name: [] for name in calls}
    for number in range(repetitions + 1):
        order = list(calls)
        random.Random(number).shuffle(order)  # the same order on all ranks: collectives match
        for name in order:
            time.sleep(pause)
            dist.barrier(group)
            start = time.perf_counter()
            calls[name]()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


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
    codecs: Iterable[tuple[str, bool]], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return computation and messages of one vector on this rank, by codec, collective and size."""
    rows = []
    for spec, feedback in codecs:
        for elements, matrices in _sizes(spec):
            unit = unit_of(elements, matrices)
            vectors = {
                operation: Vector(spec, feedback, unit, operation, group)
                for operation in ("reduce_scatter", "all_reduce")
            }
            calls = {name: vector.reduce for name, vector in vectors.items()}
            times = interleave(calls, repetitions, group)
            rows += [
                {
                    "codec": spec,
                    "error_feedback": feedback,
                    "operation": name,
                    "elements": elements,
                    "matrices": matrices,
                    "messages": [{"operation": way, "nbytes": n} for way, n in vector.messages],
                    "seconds": times[name],
                }
                for name, vector in vectors.items()
            ]
    return rows


def _sizes(codec: str) -> list[tuple[int, int]]:
    """Return elements and matrices of the vectors to measure."""
    single, spec = [(n, 1) for n in ELEMENTS], CODECS.get(split_text(codec)["name"])
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
