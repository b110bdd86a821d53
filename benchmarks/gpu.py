"""Codecs, copies and updates on a GPU; without one, on the CPU.

    python -m benchmarks.gpu [--elements N] [--repetitions R] [--threads T] [--out FOLDER]

Codecs: bytes touched per second as a share of those of a copy on the device, as in
`benchmarks/codecs.py`, of Gaussian noise. Copies: page-locked copies in both directions and our
update of parameters in host memory, the three rates that bound a step of `slide`. `make bench-gpu`
also runs the benchmarks of engines, off-load and rivals, which use GPUs where there are some.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks import adam
from benchmarks.codecs import COLUMNS, SPECS, codec_calls, shares_of_copy
from benchmarks.common import arguments, best_times, clock_of, on_ranks, publish, text_table
from shardlab.codecs.base import Codec
from shardlab.codecs.registry import make_method
from shardlab.codecs.workers import Workers
from shardlab.comm.object_collectives import device_of
from shardlab.core.numbers import figure


def codec_cells(codec: Codec, n: int, repetitions: int, group: dist.ProcessGroup) -> list[str]:
    """Return GB copied per second, and the shares of it of `COLUMNS`."""
    device = device_of(group)
    touched, calls = codec_calls(codec, torch.randn(n, device=device))
    seconds = best_times(calls, repetitions, clock=clock_of(device))
    copy = touched["memcpy"] / seconds["memcpy"] / 1e9
    return [figure(value) for value in (copy, *shares_of_copy(touched, seconds).values())]


def rates(n: int, repetitions: int, threads: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Return parameters per second of copies in bf16 and of updates, by name."""
    device = device_of(group)
    host = torch.empty(n, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    there = torch.zeros(n, dtype=torch.bfloat16, device=device)
    copies: dict[str, Callable[[], object]] = {
        "copy to device": lambda: there.copy_(host, non_blocking=True),
        "copy to host": lambda: host.copy_(there, non_blocking=True),
    }
    seconds = best_times(copies, repetitions, clock=clock_of(device))
    workers = Workers(threads)
    updates = adam.calls(adam.Vectors(n), workers)
    ways = {name: updates[name] for name in ("mixed", "torch mixed")}
    seconds |= best_times(ways, repetitions, threads)
    workers.close()
    return {name: n / value for name, value in seconds.items()}


def main() -> None:
    args = arguments(__doc__, elements=1 << 26, repetitions=10, threads=(0, "0: all cores"))
    rows = []
    for spec in SPECS:
        if isinstance(method := make_method(spec), Codec):
            work = partial(codec_cells, method, args.elements, args.repetitions)
            rows.append([spec, *on_ranks(1, work)[0]])
    measure_rates = partial(rates, args.elements, args.repetitions, args.threads)
    copies = on_ranks(1, measure_rates, args.threads)[0]
    publish(
        __doc__,
        args.out / "gpu.md",
        text_table("Codecs: share of a copy's rate", ["codec", "copy, GB/s", *COLUMNS], rows),
        text_table(
            "Copies in bf16, and updates",
            ["what", "million parameters/s"],
            [[name, figure(rate / 1e6)] for name, rate in copies.items()],
        ),
    )


if __name__ == "__main__":
    main()
