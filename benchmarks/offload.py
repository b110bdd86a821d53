"""Memory and step of `slide`, FSDP2 and DDP.

    python -m benchmarks.offload [--world-size W] [--layers L ...] [--width H] [--vocabulary V]
                                 [--samples S] [--length T] [--steps N] [--out FOLDER]

The device is a GPU where there is one, and FSDP2 off-loads its shards to host memory there
(`CPUOffloadPolicy`), with as many threads for its AdamW as `slide` has. Elsewhere it is the CPU,
and nothing is off-loaded but by `slide`. What a GPU would hold is predicted beside it by the closed
form, in bf16 and with FSDP2's off-load.

The device holds the most that tensors took at a time, from before the model was made. On a CPU that
is what torch's profiler saw, which follows the thread that trains and misses what threads of
`slide` free: its rows are upper bounds. Host memory of `slide` is what its ranks share, by the
closed form, and not of the device.

Resident is what a rank has after the last step, and had not before the model was made, that the
kernel cannot drop without swapping (Pss_Anon and Pss_Shmem of smaps_rollup): on a CPU device and
host memory together, with what the C library keeps. A page that ranks share counts in parts. Pages
of the file of `moments: disk` are not in it, as the kernel drops them at need; here there was
memory for all of them, so that no step read the disk.

The step is the median of several of one run; AdamW, clipping at 1. Rows are not measured in turns:
on two cores steps of one row have differed by half from run to run, so they rank nothing.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import arguments, on_ranks, publish, text_table
from shardlab.comm.object_collectives import device_of, gather_values
from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT, figure
from shardlab.core.progress import say
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.kernels.cpu_placement import RankLocation, place_here
from shardlab.models.build import shape_config
from shardlab.models.memory import closed_form, host_memory
from shardlab.models.random_weights import RandomWeights
from shardlab.models.settings import Shape, StepSize
from shardlab.models.sizes import sizes_of
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.launch import RunFailed

_UNTIMED, _MB = 2, 1e6
_FULL = {"activation_checkpointing": "full"}
_SLIDE = {"engine": "slide", **_FULL}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", **_FULL},
    "fsdp2": {"engine": "fsdp2", **_FULL},
    "slide": _SLIDE,
    "slide, shards": {**_SLIDE, "param_transfer": "shard", "grad_sync": "gpu_reduce"},
    "slide, bf16": {**_SLIDE, "param_dtype": "bf16"},
    "slide, moments bf16": {**_SLIDE, "moment_dtype": "bf16"},
    "slide, moments on disk": {**_SLIDE, "moments": "disk"},
    "slide, moments on disk, bf16": {**_SLIDE, "moments": "disk", "moment_dtype": "bf16"},
}
COLUMNS = [
    *("strategy", "layers", "parameters, M", "device, MB", "closed form, MB", "ratio"),
    *("host memory of a rank, MB", "resident, MB", "on a GPU, MB", "step, s", "tokens/s"),
]


def main() -> None:
    options = arguments(
        __doc__,
        world_size=2,
        layers=[4, 8, 16, 32],
        width=256,
        vocabulary=512,
        samples=(4, "of a rank and step"),
        length=64,
        steps=(6, "that are timed"),
    )
    rows = []
    for layers in options.layers:
        for name in STRATEGIES:
            rows.append([name, str(layers), *_cells(options, layers, name)])
            say(f"benchmarks: {name}, {layers} layers: {rows[-1][3]}")
    title = f"Of one of {options.world_size} ranks"
    publish(__doc__, options.out / "offload.md", text_table(title, COLUMNS, rows), *_notes())


def _notes() -> list[str]:
    """Return what a page of a CPU lacks."""
    if torch.cuda.is_available():
        return []
    return [
        "A CPU has no memory beside the host's, so nothing is off-loaded but states of `slide`, "
        "and only `resident` and the steps were measured as they are. On a machine with a GPU the "
        "same command, with `--world-size` of its GPUs, writes this page with FSDP2 and "
        "`CPUOffloadPolicy` beside `slide`; nobody has run it on one."
    ]


def _cells(options: argparse.Namespace, layers: int, name: str) -> list[str]:
    try:
        ranks = on_ranks(options.world_size, partial(measure, options, layers, name))
    except (UserError, RunFailed) as error:  # a model that does not fit is a result
        return [str(getattr(error, "summary", error)), *[ABSENT] * (len(COLUMNS) - 3)]
    return [figure(value) for value in ranks[0]]


def measure(
    options: argparse.Namespace, layers: int, name: str, group: dist.ProcessGroup
) -> list[float]:
    """Return the figures of a strategy in `COLUMNS` from its parameters on, on each rank."""
    device = device_of(group)
    off = device.type == "cuda" and name == "fsdp2"
    if off:  # as many threads for AdamW on the CPU as `slide` has there
        masks = gather_values(sorted(os.sched_getaffinity(0)), group)
        placed = place_here([RankLocation(cpus) for cpus in masks])[dist.get_rank(group)]
        torch.set_num_threads(len(placed.workers))
    strategy = parse_strategy({**STRATEGIES[name], "offload": off})
    model = model_of(options, layers)
    step = StepSize(options.samples, options.length)
    memory = strategy, sizes_of(model, strategy, step, device), options.world_size
    form, host = (sum(parts(*memory).values()) for parts in (closed_form, host_memory))
    before = _resident_bytes()
    there = parse_strategy({**STRATEGIES[name], "offload": name == "fsdp2"})
    sizes = sizes_of(model, there, step, torch.device("cuda"))
    on_gpu = sum(closed_form(there, sizes, options.world_size).values())
    held, engine = _held(device, partial(trained, options, layers, strategy, device, group))
    seconds = [step_s(engine, options) for _ in range(options.steps)]
    median, parameters = statistics.median(seconds), sum(p.numel() for p in model.parameters())
    bytes_of = held, form, host, _resident_bytes() - before, on_gpu
    held_mb, form_mb, *others_mb = (nbytes / _MB for nbytes in bytes_of)
    tokens_per_s = options.samples * options.length / median
    return [parameters / 1e6, held_mb, form_mb, held / form, *others_mb, median, tokens_per_s]


def _resident_bytes() -> int:
    """Return the bytes of this process that the kernel cannot drop without swapping."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = dict(line.split(":") for line in lines if line.startswith("Pss_"))
    return 1024 * sum(int(kilobytes[f"Pss_{kind}"].split()[0]) for kind in ("Anon", "Shmem"))


def model_of(options: argparse.Namespace, layers: int) -> PreTrainedModel:
    """Return the GPT-2 of a row, without weights."""
    # fused attention on GPUs has heads of at most 256 elements
    heads = max(4, options.width // 64)
    config = shape_config(
        Shape(layers, options.width, heads), options.vocabulary, options.length, 0
    )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def trained(
    options: argparse.Namespace,
    layers: int,
    strategy: Strategy,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Engine:
    """Train until memory peaks: the first step allocates optimizer states, the second has all."""
    model = model_of(options, layers)
    weights, optimization = RandomWeights(model, 0), Optimization()
    engine = build_engine(model, strategy, optimization, group, weights=weights, device=device)
    for _ in range(_UNTIMED):
        step_s(engine, options)
    return engine


def batch_of(options: argparse.Namespace) -> Tensor:
    """Return random tokens."""
    return torch.randint(options.vocabulary, (options.samples, options.length + 1))


def step_s(engine: Engine, options: argparse.Namespace) -> float:
    """Return the seconds of a step."""
    batch = batch_of(options)
    start = time.perf_counter()
    engine.step([batch], 1e-4)
    return time.perf_counter() - start


def _held(device: torch.device, call: Callable[[], Engine]) -> tuple[int, Engine]:
    """Return the most bytes that tensors on the device took at a time, and the call's result."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = call()
        return torch.cuda.max_memory_allocated(device) - before, made
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes: list[int] = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes)), made


if __name__ == "__main__":
    main()
