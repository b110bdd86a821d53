"""Models larger than memory on one GPU: plain DDP, FSDP2 with off-load, and `slide`.

    python -m benchmarks.gpu.larger STRATEGY ... [--layers L] [--width H] [--samples S] [--length T]
                                    [--steps N] [--cap GIB] [--trace] [--out FOLDER]

Memory and tokens/s as in `benchmarks/offload.py`. With a cap torch allocates no more of the device,
and a strategy that does not fit has a row that says so. FSDP2 with one rank copies on the stream
that computes, and its AdamW in host memory has as many threads as there are cores less two.
"""

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import offload
from benchmarks.common import arguments, on_ranks
from benchmarks.gpu.figures import OUT, on_gpu, record
from benchmarks.gpu.traces import traced
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import RunFailed, UserError
from shardlab.strategy.document import parse_strategy

_SMALL = {"layers": 2, "width": 64, "samples": 2, "length": 32}


def main() -> None:
    options = arguments(
        __doc__,
        ("strategies", ", ".join(offload.STRATEGIES)),
        layers=20,
        width=2048,
        vocabulary=512,
        samples=(8, "of a step"),
        length=1024,
        steps=(4, "that are timed"),
        cap=(0.0, "of the device's memory, GiB; 0: none"),
        trace=(False, "keep a trace of two steps instead"),
        out=OUT,
    )
    if unknown := {*options.strategies} - {*offload.STRATEGIES}:
        names = ", ".join(offload.STRATEGIES)
        raise UserError(f"{', '.join(sorted(unknown))}: not one of {names}")
    if not on_gpu():
        vars(options).update(_SMALL)
    options.world_size = 1
    threads = max(1, len(os.sched_getaffinity(0)) - 2)
    table = "Traced: " if options.trace else ""
    table += f"{options.layers} layers of width {options.width}"
    if options.cap:
        table += f", at most {options.cap:g} GiB of the device"
    for name in options.strategies:
        work = partial(traces if options.trace else measured, options, name)
        try:
            (row,) = on_ranks(1, work, threads)
        except RunFailed as error:
            if not options.cap or error.outcome != "memory":
                raise
            row = {"fits": "no: out of memory"}
        record(options.out, table, name, row)


def measured(options: argparse.Namespace, name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return figures of a strategy by column."""
    if options.cap and on_gpu():
        total = torch.cuda.get_device_properties(device_of(group)).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / total)
    values = offload.measure(options, options.layers, name, group)
    return {"fits": "yes", **dict(zip(offload.COLUMNS[2:], values, strict=True))}


def traces(options: argparse.Namespace, name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return where the time of a step goes."""
    device = device_of(group)
    off = device.type == "cuda" and name == "fsdp2"
    strategy = parse_strategy({**offload.STRATEGIES[name], "offload": off})
    engine = offload.trained(options, options.layers, strategy, device, group)
    batches = [offload.batch_of(options) for _ in range(3)]
    return traced(engine, batches, options.out / f"trace-larger-{name}.json.gz")


if __name__ == "__main__":
    main()
