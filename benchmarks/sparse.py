"""Speed of sparse codecs in memcpys, compared with torch.topk.

One thread, reused buffers, everything in one run, the best of interleaved repetitions. Encoding:
bytes touched (an ideal single pass: vector and residual read, residual and payload written) per
core-second, as a share of `copy_`'s. Decoding: the time for the sum of W payloads, as a multiple of
the time that `copy_` takes for the dense vector. Then the gain of all cores over one, by the clock
on the wall. `python -m benchmarks.sparse [--elements N] [--density D] [--repetitions R]`.
"""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import arguments, print_table
from benchmarks.speed import best_times
from shardlab.codecs import native
from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.registry import make_codec

_KEY = MessageKey(seed=0, step=0, unit="benchmark", rank=0)


class Row(NamedTuple):
    """A timed call, and the bytes that an ideal single pass touches."""

    name: str
    touched: int
    call: Callable[[], object]


def gradient(n: int, seed: int) -> Tensor:
    """Return float32 [n] with heavy tails: normal numbers whose scale varies from row to row."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(-(-n // 512), 1, generator=generator).mul(2).exp()
    values = torch.randn(len(rows), 512, generator=generator)
    return values.mul_(rows).mul_(1e-3).flatten()[:n].contiguous()


def encoders(n: int, density: float) -> list[Row]:
    """Return memcpy, torch.topk and the encodings of each codec."""
    x, residual, kept = gradient(n, 0), gradient(n, 1), torch.empty(n)
    rank = n - max(1, round(density * n)) + 1
    threshold = float(x.abs().kthvalue(rank).values)
    rows = [
        Row("memcpy", 8 * n, lambda: kept.copy_(x)),
        Row("torch.topk alone", 4 * n, lambda: torch.topk(x.abs(), n - rank + 1, sorted=False)),
    ]
    for spec in (
        f"topk:density={density}",
        f"topk:density={density},values=int8",
        f"threshold:threshold={threshold:.9f},cap={2 * density}",
        f"randomk:density={density}",
    ):
        rows += _encoders(spec, x, residual, kept)
    return rows


def _encoders(spec: str, x: Tensor, residual: Tensor, kept: Tensor) -> list[Row]:
    codec, n, own = make_codec(spec), x.numel(), residual.clone()
    out = torch.zeros(codec.payload_bytes(n), dtype=torch.uint8)
    wire = codec.encode(x, _KEY, out).numel()
    name = spec.partition(":")[0] + (" int8" if "int8" in spec else "")

    return [
        Row(f"{name} encode", 4 * n + wire, lambda: codec.encode(x, _KEY, out)),
        Row(
            f"{name} with residual",
            12 * n + wire,
            lambda: codec.encode_residual(x, residual, kept, _KEY, out),
        ),
        Row(
            f"{name} residual in place",
            12 * n + wire,
            lambda: codec.encode_residual(x, own, own, _KEY, out),
        ),
    ]


def decoders(n: int, density: float) -> list[Row]:
    """Return memcpy and the sums of 1, 2, 4 and 8 payloads."""
    out, x = torch.zeros(n), gradient(n, 0)
    rows = [Row("memcpy", 8 * n, lambda: out.copy_(x))]
    for name in ("topk", "randomk"):
        codec = make_codec(f"{name}:density={density}")
        payloads = [codec.encode(gradient(n, seed), _KEY).clone() for seed in range(8)]
        rows += [
            Row(f"{name} sum of {w}", 0, _summing(codec, payloads[:w], out)) for w in (1, 2, 4, 8)
        ]
    return rows


def _summing(codec: Codec, payloads: list[Tensor], out: Tensor) -> Callable[[], None]:
    keys = [_KEY] * len(payloads)
    return lambda: codec.decode_sum(payloads, out, 1 / len(payloads), keys)


def main() -> None:
    args = arguments(__doc__, elements=1 << 24, density=0.01, repetitions=9)
    torch.set_num_threads(1)
    print(f"compiled kernels: {native.available()}; {args.elements} float32, {args.density:.2%}")
    for title, rows in (
        ("share of memcpy's bytes per core-second", encoders(args.elements, args.density)),
        ("time in memcpys of the dense vector", decoders(args.elements, args.density)),
    ):
        _print(title, rows, args.repetitions)


def _print(title: str, rows: list[Row], repetitions: int) -> None:
    calls = {row.name: row.call for row in rows}
    best = best_times(calls, repetitions, clock=time.thread_time)
    alone = best_times(calls, repetitions)
    together = best_times(calls, repetitions, threads=os.cpu_count() or 1)
    copy = rows[0]
    cells = []
    for row in rows:
        seconds = best[row.name]
        memcpys = seconds / best[copy.name]
        ratio = row.touched / copy.touched / memcpys if row.touched else memcpys
        gain = alone[row.name] / together[row.name]
        cells.append([row.name, f"{seconds * 1e3:.2f}", f"{ratio:.2f}", f"{gain:.2f}"])
    print_table(title, ["call", "ms", "ratio", "gain of all cores"], cells)


if __name__ == "__main__":
    main()
