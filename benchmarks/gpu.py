"""Figures of GPUs: codecs, other packages, copies and updates, off-load, training with codecs.

    make bench-gpu
    python -m benchmarks.gpu [PART ...] [--small] [--rivals FOLDER] [--out FOLDER]

Each part has processes of its own and leaves a page `gpu-PART.md`. `--small` runs the same code
with small sizes; without a GPU it runs on the CPU.

- codecs: bytes touched per second as a share of those of a copy on the device, as in
  `benchmarks/codecs.py`, of Gaussian noise.
- rivals: ratios to bitsandbytes, torchao and torch, as in `benchmarks/rivals.py`, where `make
  rivals` has installed them; of Gaussian noise.
- copies: page-locked copies in both directions and our update of parameters in host memory: the
  three rates that bound a step of `slide`.
- offload: device memory and tokens per second of `slide` and of FSDP2 with CPUOffloadPolicy for
  growing models; a model that does not fit has its error.
- training: steps of a GPT-2 with and without codecs, on all GPUs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shardlab.codecs.workers import Workers

from benchmarks import adam, codecs, engines, offload, rivals
from benchmarks.common import (
    RIVAL_PACKAGES,
    arguments,
    best_times,
    choose,
    clock_of,
    on_ranks,
    publish,
    text_table,
)
from shardlab.codecs.base import Codec
from shardlab.codecs.registry import make_method
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import UserError
from shardlab.report.tables import Table, figure
from shardlab.train.launch import RunFailed

_TRAINED = ("ddp", "ddp-int8", "ddp-topk", "fsdp2", "fsdp2-int8", "fsdp2-topk", "manual-int8")
_REAL: dict[str, Any] = {
    **{"elements": 1 << 26, "repetitions": 10, "threads": 0},
    **{"layers": (8, 24, 48, 96), "width": 2048, "samples": 4, "length": 1024},
    **{"preset": "62m", "steps": 30},
}
"""sizes; threads: 0 for all cores"""
_SMALL: dict[str, Any] = {
    **{"elements": 4096, "repetitions": 1, "threads": 1},
    **{"layers": (2,), "width": 64, "samples": 1, "length": 16, "preset": "tiny", "steps": 4},
}


def main() -> None:
    args = arguments(
        __doc__,
        ("parts", f"{', '.join(PARTS)}; default: all"),
        small=(False, "small sizes"),
        rivals=RIVAL_PACKAGES,
    )
    size = argparse.Namespace(**vars(args), **(_SMALL if args.small else _REAL), world_size=1)
    for name in choose(args.parts, PARTS, PARTS):
        publish(f"Figures of GPUs: {name}", args.out / f"gpu-{name}.md", PARTS[name](size))


def _tried(measure: Callable[[], list[str]]) -> list[str]:
    """Return the cells of a row, or the error: a model that does not fit is a result."""
    try:
        return measure()
    except (UserError, RunFailed) as error:
        return [str(getattr(error, "summary", error))]


def _codecs(size: argparse.Namespace) -> Table:
    def measure(spec: str, group: dist.ProcessGroup) -> list[str]:
        codec, device = make_method(spec), device_of(group)
        assert isinstance(codec, Codec)
        touched, calls = codecs.codec_calls(codec, torch.randn(size.elements, device=device))
        seconds = best_times(calls, size.repetitions, clock=clock_of(device))
        copy = touched["memcpy"] / seconds["memcpy"] / 1e9
        return [figure(v) for v in (copy, *codecs.shares_of_copy(touched, seconds).values())]

    specs = [spec for spec in codecs.SPECS if isinstance(make_method(spec), Codec)]
    rows = [[spec, *_tried(lambda s=spec: on_ranks(1, partial(measure, s))[0])] for spec in specs]
    headings = ["codec", "copy, GB/s", *codecs.COLUMNS]
    return text_table("Share of a copy's bytes per second", headings, rows)


def _rivals(size: argparse.Namespace) -> Table:
    rivals.import_from(size.rivals)
    return rivals.compared(rivals.RIVALS, torch.randn(size.elements), size.repetitions)


def _copies(size: argparse.Namespace) -> Table:
    def measure(group: dist.ProcessGroup) -> dict[str, float]:
        device, n = device_of(group), size.elements
        host = torch.empty(n, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        there = torch.zeros(n, dtype=torch.bfloat16, device=device)
        copies: dict[str, Callable[[], object]] = {
            "to device": lambda: there.copy_(host, non_blocking=True),
            "to host": lambda: host.copy_(there, non_blocking=True),
        }
        seconds = best_times(copies, size.repetitions, clock=clock_of(device))
        workers = Workers(size.threads)
        updates = adam.calls(adam.Vectors(n), workers)
        ours = {name: updates[name] for name in ("ceiling", "mixed", "torch mixed")}
        seconds |= best_times(ours, size.repetitions, size.threads)
        workers.close()
        return {name: n / s for name, s in seconds.items()}

    rates = on_ranks(1, measure, size.threads)[0]
    rows = [[name, figure(rate / 1e6)] for name, rate in rates.items()]
    return text_table("Copies in bf16 and updates", ["what", "million parameters/s"], rows)


def _offload(size: argparse.Namespace) -> Table:
    def case(layers: int, name: str) -> list[str]:
        work = partial(offload.measure, size, layers, name)
        return [figure(value) for value in on_ranks(1, work, size.threads)[0]]

    rows = [
        [name, str(layers), *_tried(partial(case, layers, name))]
        for layers in size.layers
        for name in ("fsdp2", "slide", "slide, shards")
    ]
    return text_table("Off-load", offload.COLUMNS, rows)


def _training(size: argparse.Namespace) -> Table:
    ranks = max(1, torch.cuda.device_count())
    cases = [
        engines.Case(name, size.preset, size.steps, size.samples * ranks, size.length)
        for name in _TRAINED
    ]
    return engines.table(cases, ranks, None, 1)


PARTS: dict[str, Callable[[argparse.Namespace], Table]] = {
    "codecs": _codecs,
    "rivals": _rivals,
    "copies": _copies,
    "offload": _offload,
    "training": _training,
}


if __name__ == "__main__":
    main()
