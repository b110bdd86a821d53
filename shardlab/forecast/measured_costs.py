"""Costs of codecs, copies and optimizer updates, while all ranks do the same."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab.codecs.adam import Hyper, adam_
from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.codecs.workers import Workers
from shardlab.config.calibration_record import UPDATE_BYTES, MemoryOperation
from shardlab.config.codec_table import codec_text
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
    found = []
    for spec, feedback in codecs:
        for elements in ELEMENTS:
            message = _Message(spec, feedback, elements)
            calls = {"encode_s": message.encode, "decode_s": message.decode}
            times = interleave(calls, repetitions, group)
            found.append(
                {
                    "codec": spec,
                    "error_feedback": feedback,
                    "elements": elements,
                    "payload_bytes": statistics.fmean(message.sizes),
                    "variable": message.variable,
                    **times,
                }
            )
    return found


class _Message:
    """A message that is encoded and decoded again and again; its size may differ each time."""

    def __init__(self, spec: str, feedback: bool, n: int) -> None:
        self._codec, self._feedback = make_codec(spec), feedback
        self.variable = self._codec.variable
        self._key = MessageKey(0, 0, "unit", 0)
        self._vector, self._out, self._residual = torch.randn(n) * 1e-3, *torch.zeros(2, n)
        self._payload = torch.empty(self._codec.payload_bytes(n), dtype=torch.uint8)
        self.sizes: list[int] = []
        """bytes of the payloads so far"""
        self.encode()

    def encode(self) -> None:
        codec, residual = self._codec, self._residual
        if self._feedback:
            sent = codec.encode_residual(self._vector, residual, residual, self._key, self._payload)
        else:
            sent = codec.encode(self._vector, self._key, self._payload)
        self.sizes.append(sent.numel())

    def decode(self) -> None:
        """Decode what was encoded last."""
        payload = self._payload[: self.sizes[-1]]
        self._codec.decode_sum([payload], self._out, 1.0, [self._key])


def memory_times(
    operations: Sequence[MemoryOperation], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs of memory operations on this rank."""
    found = []
    for n in _VECTORS:
        every = _in_memory(n)
        times = interleave({name: every[name] for name in operations}, repetitions, group)
        sizes = {"update": UPDATE_BYTES * n}
        found += [
            {"operation": name, "nbytes": sizes.get(name, 4 * n), "seconds": seconds}
            for name, seconds in times.items()
        ]
    return found


def _in_memory(n: int) -> Mapping[str, Callable[[], object]]:
    source, target = torch.ones(n), torch.ones(n)
    vectors, hyper = torch.zeros(4, n), Hyper(1e-3)
    threads = torch.get_num_threads()
    workers = Workers(threads) if threads > 1 else None
    parameter, exp_avg, exp_avg_sq, gradient = vectors
    return {
        "copy": lambda: target.copy_(source),
        "update": lambda: adam_(
            parameter, exp_avg, exp_avg_sq, [gradient], hyper, 1, workers=workers
        ),
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
