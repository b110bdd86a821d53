"""Costs of codecs, multi-phase methods and memory operations, while all ranks do the same."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Block, MessageKey, Unit
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method
from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import shorten
from shardlab.core.progress import say
from shardlab.kernels.adam import Hyper, adam_
from shardlab.kernels.workers import Workers
from shardlab.predict.settings import Space
from shardlab.results.calibration_record import (
    UPDATE_BYTES,
    MemoryOperation,
    Operation,
    PhasedOperation,
)
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.document import Strategy

ELEMENTS = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
"""of a message"""
_VECTORS = [4 * n for n in ELEMENTS]
"""elements of the float32 vectors that memory operations move"""

_K = TypeVar("_K", bound=str)


def codecs_of(strategies: Iterable[Strategy], space: Space) -> list[tuple[str, bool]]:
    """Return each codec once that a strategy has or the search may propose, and whether error
    feedback wraps it."""
    full = list(strategies)
    gradients = [*(strategy.gradients for strategy in full), *space.gradients]
    gathered = [strategy.weights.codec for strategy in full if strategy.weights is not None]
    outer = [*(strategy.sync for strategy in full if strategy.sync is not None), *space.sync]
    used = dict.fromkeys(
        [
            *((each.codec, each.error_feedback) for each in gradients),
            *((each.between_nodes, each.error_feedback) for each in gradients),
            *((each.codec, each.error_feedback) for each in outer),
            *((codec, False) for codec in (*gathered, *space.weights)),
        ]
    )
    return [
        (codec_text(codec), feedback)
        for codec, feedback in used
        if codec is not None and codec.name != "none"
    ]


def working(codecs: Iterable[tuple[str, bool]], group: dist.ProcessGroup) -> list[tuple[str, bool]]:
    """Return the codecs that all ranks can send messages of each size by; say why not others."""
    found = []
    for spec, feedback in codecs:
        errors = gather_values(_error_of(spec, feedback, group), group)
        error = next(filter(None, errors), None)
        if error is None:
            found.append((spec, feedback))
        elif dist.get_rank(group) == 0:
            say(f"crashed: codec {spec} in calibrate: {error}; no forecast has it")
    return found


def _error_of(spec: str, feedback: bool, group: dist.ProcessGroup) -> str | None:
    """Return why this rank cannot encode and decode; it waits for no other rank."""
    method, key = make_method(spec), MessageKey(0, 0, "unit", 0)
    try:
        for n in ELEMENTS:
            if isinstance(method, MultiPhaseMethod):
                Reduction(spec, feedback, n, "all_reduce", group)
            else:
                payload = method.encode(torch.randn(n), key)
                method.decode_sum([payload], torch.zeros(n), 1.0, [key])
    except Exception as error:  # whatever a codec of the user raises
        return shorten(f"{type(error).__name__}: {error}")
    return None


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
    rows, threads = [], torch.get_num_threads()
    workers, hyper = Workers(threads) if threads > 1 else None, Hyper(1e-3)
    for n in _VECTORS:
        source, target, parameter, exp_avg, exp_avg_sq = torch.zeros(5, n)
        calls: dict[MemoryOperation, Callable[[], object]] = {
            "copy": partial(target.copy_, source),
            "update": partial(
                adam_, parameter, exp_avg, exp_avg_sq, [source], hyper, 1, workers=workers
            ),
        }
        times = interleave({name: calls[name] for name in operations}, repetitions, group)
        sizes = {"copy": 4 * n, "update": UPDATE_BYTES * n}
        rows += [
            {"operation": name, "nbytes": sizes[name], "seconds": seconds}
            for name, seconds in times.items()
        ]
    return rows


def interleave(
    calls: Mapping[_K, Callable[[], object]], repetitions: int, group: dist.ProcessGroup
) -> dict[_K, list[float]]:
    """Return the seconds of this rank in each repetition, after one that allocates and connects."""
    times: dict[_K, list[float]] = {name: [] for name in calls}
    for number in range(repetitions + 1):
        order = list(calls)
        random.Random(number).shuffle(order)  # the same order on all ranks: collectives match
        for name in order:
            dist.barrier(group)
            start = time.perf_counter()
            calls[name]()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


_EDGE = 256
"""rows and columns of the matrices of long vectors"""
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

    def all_reduce(self, vector: Tensor) -> None:
        """Record an all-reduce."""
        self.messages.append(("all_reduce", vector.nbytes))

    def all_reduce_max(self, vector: Tensor) -> None:
        """Record an all-reduce of maxima."""
        self.messages.append(("all_reduce", vector.nbytes))

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Record a reduce-scatter; return W times the own chunk."""
        self.messages.append(("reduce_scatter", vector.nbytes))
        own = vector.chunk(self.world_size)[self.rank]
        total = own.clone()
        for _ in range(self.world_size - 1):
            total += own
        return total

    def all_gather(self, shard: Tensor) -> Tensor:
        """Record an all-gather; return the shard W times."""
        self.messages.append(("gather", self.world_size * shard.nbytes))
        return shard.repeat(self.world_size)

    def report_uncompressed(self, reason: str) -> None:
        """Do nothing: what is sent uncompressed is recorded as any message."""


def phased_times(
    codecs: Iterable[tuple[str, bool]], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return computation and messages of one vector on this rank, by codec, collective and size."""
    rows = []
    for spec, feedback in codecs:
        for elements in ELEMENTS:
            reductions = {
                operation: Reduction(spec, feedback, elements, operation, group)
                for operation in get_args(PhasedOperation)
            }
            calls = {name: reduction.run for name, reduction in reductions.items()}
            times = interleave(calls, repetitions, group)
            rows += [
                {
                    "codec": spec,
                    "error_feedback": feedback,
                    "operation": name,
                    "elements": elements,
                    "messages": [{"operation": way, "nbytes": n} for way, n in reduction.messages],
                    "seconds": times[name],
                }
                for name, reduction in reductions.items()
            ]
    return rows


def unit_of(elements: int) -> Unit:
    """Return a unit of nearly square matrices, which some methods factor."""
    count = -(-elements // _EDGE**2)
    each = elements // count
    rows = next(n for n in range(math.isqrt(each), 0, -1) if each % n == 0)
    return Unit("unit", tuple(Block(f"matrix{n}", rows, each // rows) for n in range(count)))


class Reduction:
    """A vector that is reduced again and again, in an ordinary step of its method."""

    def __init__(
        self,
        spec: str,
        feedback: bool,
        elements: int,
        operation: PhasedOperation,
        group: dist.ProcessGroup,
    ) -> None:
        method = make_method(spec)
        assert isinstance(method, MultiPhaseMethod), "codecs of one payload are measured by it"
        self._feedback, self._group, self._unit = feedback, group, unit_of(elements)
        scattered = operation == "reduce_scatter"
        self._reduce = method.reduce_scatter if scattered else method.all_reduce
        ranks = dist.get_world_size(group) if scattered else 1
        n = ranks * sum(self._unit.chunk_sizes(ranks))
        self._vector, self._residual = torch.randn(n) * 1e-3, torch.zeros(n)
        self.run(_FIRST)
        self.run()

    def run(self, step: int = _ORDINARY) -> None:
        """Reduce the vector and keep what was not sent."""
        wire = LocalCommunicator(self._group)
        given = self._vector + self._residual if self._feedback else self._vector.clone()
        self._reduce(given, self._unit, wire, MessageKey(0, step, self._unit.name, wire.rank))
        if self._feedback:
            self._residual.copy_(given)
        self.messages = wire.messages
