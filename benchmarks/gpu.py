"""Figures of GPUs: kernels, codecs, copies and updates, off-load, training with codecs.

    make bench-gpu
    python -m benchmarks.gpu [PART ...] [--device cpu] [--small] [--work FOLDER] [--rivals FOLDER]

A part with all that it names is measured in processes of its own and leaves a JSON file for each;
files of the same code on the same GPUs are not measured again. `--device cpu --small` runs the same
code with small sizes without a GPU.

- kernels: bytes touched per second as a share of those of a copy on the device, as in
  `benchmarks.kernels`.
- codecs: ratios to bitsandbytes, torchao and torch, as in `benchmarks.rivals`, where `make rivals`
  has installed them; of Gaussian noise.
- copies: page-locked copies in both directions and our update of parameters in host memory: the
  three rates that bound a step of `slide`.
- offload: device memory and tokens per second of `slide` and of FSDP2 with CPUOffloadPolicy for
  growing models and the largest ones whose closed forms fit; a model that does not has its error.
- training: steps of a GPT-2 with and without codecs, on all GPUs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import adam, engines, kernels, offload, rivals
from benchmarks.common import (
    RIVAL_PACKAGES,
    arguments,
    choose,
    code_and_gpus,
    on_ranks,
    print_table,
)
from benchmarks.other_codecs import RIVALS
from benchmarks.speed import best_times, clock_of
from shardlab.codecs.registry import make_codec
from shardlab.codecs.workers import Workers
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.core.progress import say
from shardlab.report.tables import figure
from shardlab.train.launch import RunFailed

_STRATEGIES = ("fsdp2", "slide", "slide, shards")
_TRAINED = ("ddp", "ddp-int8", "ddp-topk", "fsdp2", "fsdp2-int8", "fsdp2-topk", "manual-int8")
_REAL: dict[str, Any] = {
    **{"elements": 1 << 27, "codec_elements": 1 << 26, "repetitions": 10, "threads": 0},
    **{"layers": (8, 24, 48, 0), "width": 2048, "samples": 4, "length": 1024, "most_layers": 400},
    **{"preset": "62m", "steps": 30},
}
"""sizes; threads: 0 for all cores; layers: 0 for the largest model"""
_SMALL: dict[str, Any] = {
    **{"elements": 4096, "codec_elements": 4096, "repetitions": 1, "threads": 1},
    **{"layers": (2, 0), "width": 64, "samples": 1, "length": 16, "most_layers": 3},
    **{"preset": "tiny", "steps": 4},
}
Cases = dict[str, Callable[[], Any]]


def main() -> None:
    args = arguments(
        __doc__,
        ("parts", "kernels, codecs, copies, offload, training; default: all"),
        device=("cuda", "or cpu"),
        small=(False, "small sizes"),
        work=Path(".work/gpu/benchmarks"),
        rivals=RIVAL_PACKAGES,
    )
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.device_count():
        raise UserError("no NVIDIA GPU: give --device cpu --small for a trial without one")
    # ranks are forked from this process, and the threads of an OpenMP pool do not survive a fork
    torch.set_num_threads(1)
    sys.path.append(str(args.rivals))
    size = argparse.Namespace(**(_SMALL if args.small else _REAL), world_size=1)
    size.threads = size.threads or len(os.sched_getaffinity(0))
    on = {**code_and_gpus(), "device": args.device, "small": args.small}
    for part in choose(args.parts, _PARTS, _PARTS):
        cases, show = _PARTS[part]
        found = {}
        for name, measure in cases(size).items():
            file = args.work / part / f"{name.replace(', ', '-')}.json"
            found[name] = _measured(file, on, measure)
        show(found)


def _measured(file: Path, on: dict[str, Any], measure: Callable[[], Any]) -> dict[str, Any]:
    """Return what the file holds, if it was measured by this code on these GPUs; else measure."""
    known: dict[str, Any] = read_json(file) if file.exists() else {}
    if known.get("on") == on:
        return known
    start = time.perf_counter()
    try:
        result = {"found": measure(), "failure": None}
    except (UserError, RunFailed) as error:  # a model that does not fit is a result
        result = {"found": None, "failure": str(getattr(error, "summary", error))}
    known = {"on": on, "seconds": time.perf_counter() - start, **result}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, known)
    say(f"benchmarks: {file}: {known['failure'] or 'measured'}")
    return known


def _kernels(size: argparse.Namespace) -> Cases:
    def measure(name: str, group: dist.ProcessGroup) -> dict[str, float]:
        device = device_of(group)
        x = kernels.vector("", size.elements).to(device)
        case = kernels.Case(make_codec(name), x)
        return case.rates(1, size.repetitions, clock_of(device))

    def case(name: str) -> Callable[[], Any]:
        return lambda: on_ranks(1, partial(measure, name))[0]

    return {name: case(name) for name in kernels.CODECS}


def _show_kernels(found: dict[str, Any]) -> None:
    rates = {name: each["found"] for name, each in found.items() if each["found"]}
    columns = [name for name in next(iter(rates.values())) if name != "memcpy"]
    body = [
        [name, figure(rate["memcpy"] / 1e9), *(f"{rate[c] / rate['memcpy']:.2f}" for c in columns)]
        for name, rate in rates.items()
    ]
    print_table("Share of a copy's bytes per second", ["format", "copy, GB/s", *columns], body)


def _codecs(size: argparse.Namespace) -> Cases:
    x = kernels.vector("", size.codec_elements)

    def case(number: int) -> Callable[[], Any]:
        return lambda: asdict(rivals.match(RIVALS[number], x, size.repetitions))

    return {f"{number:02}": case(number) for number in range(len(RIVALS))}


def _show_codecs(found: dict[str, Any]) -> None:
    rivals.print_matches([rivals.Match(**each["found"]) for each in found.values()])


def _copies(size: argparse.Namespace) -> Cases:
    def measure(group: dist.ProcessGroup) -> dict[str, float]:
        device, n = device_of(group), size.elements
        host = torch.empty(n, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        there = torch.zeros(n, dtype=torch.bfloat16, device=device)
        calls: dict[str, Callable[[], object]] = {
            "to device": lambda: there.copy_(host, non_blocking=True),
            "to host": lambda: host.copy_(there, non_blocking=True),
        }
        seconds = best_times(calls, size.repetitions, clock=clock_of(device))
        workers = Workers(size.threads)
        updates = adam.calls(adam.Vectors(n), workers)
        ours = {name: updates[name] for name in ("ceiling", "mixed", "torch mixed")}
        seconds |= best_times(ours, size.repetitions, size.threads)
        workers.close()
        return {name: n / each for name, each in seconds.items()}

    return {"rates": lambda: on_ranks(1, measure, size.threads)[0]}


def _show_copies(found: dict[str, Any]) -> None:
    rates = found["rates"]["found"]
    body = [[name, figure(rate / 1e6)] for name, rate in rates.items()]
    print_table("Copies in bf16 and updates", ["what", "million parameters/s"], body)


def _offload(size: argparse.Namespace) -> Cases:
    def case(layers: int, name: str) -> Callable[[], Any]:
        return lambda: on_ranks(1, partial(offload.measure, size, layers, name), size.threads)[0]

    return {
        f"{name}, {layers or 'largest'}": case(layers, name)
        for layers in size.layers
        for name in _STRATEGIES
    }


def _show_offload(found: dict[str, Any]) -> None:
    body = []
    for name, each in found.items():
        figures, columns = each["found"], offload.COLUMNS
        cells = [offload.cell(figures[c]) for c in columns] if figures else [each["failure"]]
        body.append([name, *cells, *[""] * (len(columns) - len(cells))])
    print_table("Off-load", ["strategy, layers", *offload.COLUMNS.values()], body)


def _training(size: argparse.Namespace) -> Cases:
    ranks = max(1, torch.cuda.device_count())

    def case(name: str) -> Callable[[], Any]:
        run = engines.Case(name, ranks, size.preset, size.steps)
        run = run._replace(samples=size.samples * ranks, length=size.length)
        return lambda: on_ranks(ranks, partial(engines.measure, run), threads=1)[0]

    return {name: case(name) for name in _TRAINED}


def _show_training(found: dict[str, Any]) -> None:
    body = []
    for name, each in found.items():
        run = each["found"]
        cells = [each["failure"], "", "", ""]
        if run is not None:
            numbers = run["step_ms"], run["memory_mb"], run["gradients_bytes_wire"] / 1e6
            cells = [*map(figure, numbers), f"{run['losses'][-1]:.4f}"]
        body.append([name, *cells])
    head = ["strategy", "step, ms", "peak memory, MB", "gradients, MB/step", "last loss"]
    print_table("Training", head, body)


_PARTS: dict[
    str, tuple[Callable[[argparse.Namespace], Cases], Callable[[dict[str, Any]], None]]
] = {
    "kernels": (_kernels, _show_kernels),
    "codecs": (_codecs, _show_codecs),
    "copies": (_copies, _show_copies),
    "offload": (_offload, _show_offload),
    "training": (_training, _show_training),
}


if __name__ == "__main__":
    main()
