"""Speed of a codec on one vector: bytes touched per second, compared with interleaved memcpy.

Touched is every byte that an ideal single pass reads or writes once. One thread unless stated
otherwise, reused buffers, the fastest of several repetitions of interleaved calls.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, Unit
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.wire import Buffers
from shardlab.core.progress import stopwatch

PAYLOADS = (2, 4, 8)
KEY = MessageKey(0, 0, "gradient", 0)
Call = Callable[[], object]

_SPINNING_S = 0.05


@dataclass(frozen=True)
class Speed:
    """Rates of a codec; a multi-phase method has `encode` alone, for its whole work on one rank."""

    encode: float
    """GB of float32 per second"""
    encode_residual: float | None
    decode: float | None
    """GB of float32 per second of each of 4 payloads that are summed"""
    shares: dict[str, float]
    """by call: bytes touched per second, as a share of memcpy's"""
    second_thread: dict[str, float]
    """by call: rate of two threads over that of one"""


def best_times(
    calls: dict[str, Call],
    repetitions: int,
    threads: int = 1,
    limit_s: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return seconds of the fastest repetition of each call; repetitions are interleaved.

    With several threads each is a pause and two calls, of which the second is timed: torch's
    threads spin for some 10 ms after an operation, on processors that the next call needs.

    Args:
        limit_s: no repetition starts later than this, except the first two.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = dict.fromkeys(calls, float("inf"))
    seconds = stopwatch()
    for done in range(repetitions + 1):
        if done >= 2 and seconds() > limit_s:
            break
        for name, call in calls.items():
            if threads > 1:
                time.sleep(_SPINNING_S)
                call()
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    torch.set_num_threads(before)
    return best


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device; a call then costs a launch and a wait more."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def as_received(payloads: list[Tensor]) -> list[Tensor]:
    """Copy payloads to where an all-to-all receives them: one after another.

    Separate allocations would begin at the same offset of a page and evict each other from caches.
    """
    sizes = [payload.numel() for payload in payloads]
    messages = Buffers().messages("received", sizes, payloads[0].device)
    return [message.copy_(payload) for message, payload in zip(messages, payloads, strict=True)]


def codec_speed(codec: Codec, x: Tensor, repetitions: int) -> Speed:
    """Measure a codec on float32 [n]."""
    n = x.numel()
    residual, out = torch.zeros_like(x), torch.zeros_like(x)
    buffer = torch.empty(codec.payload_bytes(n), dtype=torch.uint8)
    keys = [KEY._replace(rank=rank) for rank in range(max(PAYLOADS))]
    payloads = as_received([codec.encode(x, key).clone() for key in keys])
    wire = payloads[0].numel()

    def summed(count: int) -> Call:
        return lambda: codec.decode_sum(payloads[:count], out, 1 / count, keys[:count])

    calls: dict[str, Call] = {
        "memcpy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, KEY, buffer),
        "encode + residual": lambda: codec.encode_residual(x, residual, residual, KEY, buffer),
    } | {f"sum of {count}": summed(count) for count in PAYLOADS}
    touched = {"memcpy": 8 * n, "encode": 4 * n + wire, "encode + residual": 12 * n + wire} | {
        f"sum of {count}": 4 * n + count * wire for count in PAYLOADS
    }
    times = best_times(calls, repetitions)
    faster = best_times(calls, repetitions, threads=2)
    memcpy = touched["memcpy"] / times["memcpy"]
    return Speed(
        encode=4e-9 * n / times["encode"],
        encode_residual=4e-9 * n / times["encode + residual"],
        decode=4e-9 * n * 4 / times["sum of 4"],
        shares={name: touched[name] / times[name] / memcpy for name in calls},
        second_thread={name: times[name] / faster[name] for name in calls},
    )


class Alone:
    """Communicator of a single rank that counts bytes, each collective once."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.bytes = 0

    def sum(self, vector: Tensor) -> None:
        """Leave the vector as it is."""
        self.bytes += vector.nbytes

    largest = sum

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """Return the vector."""
        self.bytes += vector.nbytes
        return vector.clone()

    def gather(self, shard: Tensor) -> Tensor:
        """Return the shard."""
        self.bytes += shard.nbytes
        return shard.clone()

    def uncompressed(self, reason: str) -> None:
        """Count its bytes like all others."""


def phase_speed(method: MultiPhaseMethod, x: Tensor, unit: Unit, repetitions: int) -> Speed:
    """Measure a multi-phase method with existing state, without communication."""
    given, wire, step = x.clone(), Alone(), 0
    method.sum_scatter(given, unit, wire, KEY)

    def reduce() -> None:
        nonlocal step
        step += 1
        given.copy_(x)
        method.sum_scatter(given, unit, wire, KEY._replace(step=step))

    out = torch.zeros_like(x)
    times = best_times({"memcpy": lambda: out.copy_(x), "reduce": reduce}, max(2, repetitions // 4))
    work = times["reduce"] - times["memcpy"]
    return Speed(4e-9 * x.numel() / work, None, None, {}, {})
