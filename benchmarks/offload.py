"""Device memory of `slide`, FSDP2 and DDP, compared with the closed forms, for growing models.

    python -m benchmarks.offload [--world-size W] [--layers L ...] [--width H] [--samples S]
                                 [--length T] [--steps N] [--out FOLDER]

The device is a GPU where there is one, and FSDP2 off-loads its shards to host memory there
(`CPUOffloadPolicy`), with as many threads for its AdamW as `slide` has. Elsewhere it is the CPU:
the device holds then what torch allocates, and the host memory of `slide` is what its ranks share,
which torch does not allocate.

What is held is the most that tensors took at a time, from before the model was made. Tokens per
second are of one rank, the median of several steps of one run; AdamW, clipping at 1.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
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

_VOCABULARY, _UNTIMED, _MB = 512, 2, 1e6
_FULL = {"activation_checkpointing": "full"}
_SLIDE = {"engine": "slide", **_FULL}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", **_FULL},
    "fsdp2": {"engine": "fsdp2", **_FULL},
    "slide": _SLIDE,
    "slide, shards": {**_SLIDE, "param_transfer": "shard", "grad_sync": "gpu_reduce"},
    "slide, bf16": {**_SLIDE, "param_dtype": "bf16"},
}
COLUMNS = [
    *("strategy", "layers", "parameters, M", "device, MB", "closed form, MB", "ratio"),
    *("host memory of a rank, MB", "tokens/s"),
]


def main() -> None:
    options = arguments(
        __doc__,
        world_size=2,
        layers=[4, 8, 16, 32],
        width=256,
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
    publish(__doc__, options.out / "offload.md", text_table(title, COLUMNS, rows))


def _cells(options: argparse.Namespace, layers: int, name: str) -> list[str]:
    try:
        ranks = on_ranks(options.world_size, partial(measure, options, layers, name))
    except (UserError, RunFailed) as error:  # a model that does not fit is a result
        return [str(getattr(error, "summary", error)), *[ABSENT] * 5]
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
    held, engine = _held(device, partial(trained, options, layers, strategy, device, group))
    seconds = [step_s(engine, options) for _ in range(options.steps)]
    parameters = sum(p.numel() for p in model.parameters())
    tokens_per_s = options.samples * options.length / statistics.median(seconds)
    return [parameters / 1e6, held / _MB, form / _MB, held / form, host / _MB, tokens_per_s]


def model_of(options: argparse.Namespace, layers: int) -> PreTrainedModel:
    """Return the GPT-2 of a row, without weights."""
    # fused attention on GPUs has heads of at most 256 elements
    heads = max(4, options.width // 64)
    config = shape_config(Shape(layers, options.width, heads), _VOCABULARY, options.length, 0)
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
    return torch.randint(_VOCABULARY, (options.samples, options.length + 1))


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
