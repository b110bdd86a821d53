"""Costs of codecs, copies, optimizer updates and disk access, while all ranks do the same."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab.activations.anonymous_file import AnonymousFile, aligned_blocks
from shardlab.activations.checkpoint import scratch_folder
from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.codecs.wire import HEADER, Buffers, Contents, describe, message_bytes, seal, unseal
from shardlab.kernels.adam import Hyper, adam_
from shardlab.kernels.workers import Workers
from shardlab.measurements.calibration import UPDATE_BYTES, MemoryOperation
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.strategy import Strategy

ELEMENTS = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
"""of a message"""
_VECTORS = [4 * n for n in ELEMENTS]
"""elements of the float32 vectors that memory operations move"""

Times = dict[str, list[float]]


def codecs_of(strategies: Iterable[Strategy]) -> list[tuple[str, bool]]:
    """Return each single-phase codec once, and whether error feedback wraps it."""
    used = {}
    for strategy in strategies:
        gradients, weights = strategy.gradients, strategy.weights
        if gradients.codec.name != "none" and not gradients.codec.multi_phase:
            used[codec_text(gradients.codec), gradients.error_feedback] = True
        if weights is not None and weights.codec.name != "none":
            used[codec_text(weights.codec), False] = True
    return list(used)


def codec_times(
    spec: str, feedback: bool, repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs of one message with its header on this rank."""
    found = []
    for elements in ELEMENTS:
        encode, decode, payload_bytes = _codec_calls(spec, feedback, elements)
        times = interleave({"encode_s": encode, "decode_s": decode}, repetitions, group)
        found.append({"elements": elements, "payload_bytes": payload_bytes, **times})
    return found


def _codec_calls(
    spec: str, feedback: bool, n: int
) -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return functions that encode and decode one message, and the bytes of its payload."""
    codec, key = make_codec(spec), MessageKey(0, 0, "unit", 0)
    vector, out, residual = torch.randn(n) * 1e-3, torch.zeros(n), torch.zeros(n)
    (message,) = Buffers().messages("sent", [message_bytes(codec.payload_bytes(n))], vector.device)
    buffer, contents = (
        message[HEADER:][: codec.payload_bytes(n)],
        Contents(describe(codec), n, "", 0),
    )

    def encode() -> int:
        if feedback:
            payload = codec.encode_residual(vector, residual, residual, key, buffer)
        else:
            payload = codec.encode(vector, key, buffer)
        seal(message, payload.numel(), contents)
        return payload.numel()

    size = encode()

    def decode() -> None:
        sealed = message[: message_bytes(size)]
        codec.decode_sum([unseal(sealed, size, contents, 0)], out, 1.0, [key])

    return encode, decode, size


def memory_times(
    operations: Sequence[MemoryOperation], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs of memory operations on this rank."""
    found = []
    for n in _VECTORS:
        every = {**_in_memory(n), **(_on_disk(n) if "load" in operations else {})}
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


def _on_disk(n: int) -> Mapping[str, Callable[[], object]]:
    file = AnonymousFile.create(scratch_folder())
    buffer = aligned_blocks(4 * n, torch.device("cpu"))
    file.reserve(0, buffer.numel())
    return {"load": lambda: file.read(0, buffer), "store": lambda: file.write(0, buffer)}


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
