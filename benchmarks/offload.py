"""Device memory of `slide` and FSDP2, compared with the closed forms, for growing models.

    python -m benchmarks.offload [--world-size W] [--layers L ...] [--width H] [--samples S]
                                 [--length T] [--most-layers M] [--out FILE]

The device is a GPU where there is one, and FSDP2 off-loads its shards to host memory there
(`CPUOffloadPolicy`). Elsewhere it is the CPU: the device holds then what torch allocates, and the
host memory of `slide` is what its ranks share, which torch does not allocate.

What is held is the most that tensors took at a time, from before the model was made. Tokens per
second are of one rank, the median of several steps of one run; AdamW, clipping at 1.
"""

import argparse
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

from benchmarks.common import arguments, on_ranks, print_table, write_results
from shardlab.comm.object_collectives import device_of
from shardlab.config.schema import Train
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.core.progress import say
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.step_space import free_bytes
from shardlab.models.build import Shape, shape_config
from shardlab.models.memory import Sizes, closed_form, device_memory, host_memory
from shardlab.models.sizes import sizes_of
from shardlab.models.weights import RandomWeights
from shardlab.report.tables import figure

_VOCABULARY, _UNTIMED, _TIMED, _MB = 512, 2, 6, 1e6
_USED = 0.9
"""of the free memory, by the largest model"""
_FULL = {"activation_checkpointing": "full"}
_SLIDE = {"engine": "slide", **_FULL}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"engine": "fsdp2", **_FULL},
    "slide": _SLIDE,
    "slide, shards": {**_SLIDE, "param_transfer": "shard", "grad_sync": "gpu_reduce"},
    "slide, window 4": {**_SLIDE, "window": 4},
    "slide, bf16": {**_SLIDE, "param_dtype": "bf16"},
}
COLUMNS = {
    "layers": "layers",
    "parameters_m": "parameters, M",
    "device_mb": "device, MB",
    "closed_form_mb": "closed form, MB",
    "ratio": "ratio",
    "host_memory_mb": "host memory of a rank, MB",
    "tokens_per_s": "tokens/s",
}


def main() -> None:
    options = arguments(
        __doc__,
        world_size=2,
        layers=([4, 8, 16, 32], "0: as many as fit the free memory"),
        most_layers=400,
        width=256,
        samples=(4, "of a rank and step"),
        length=64,
        out=Path(".work/benchmarks/offload.json"),
    )
    rows = []
    for layers in options.layers:
        for name in STRATEGIES:
            found = on_ranks(options.world_size, partial(measure, options, layers, name))
            rows.append({"strategy": name, **found[0]})
            say(f"{name}, {layers} layers: {rows[-1]['device_mb']:.1f} MB")
    body = [[row["strategy"], *(cell(row[column]) for column in COLUMNS)] for row in rows]
    head = ["strategy", *COLUMNS.values()]
    print_table(f"Of one of {options.world_size} ranks", head, body)
    setting = {key: str(value) for key, value in vars(options).items()}
    write_results(options.out, options=setting, rows=rows)


def cell(value: float) -> str:
    """Return a number of `measure` as tables show it."""
    return str(value) if isinstance(value, int) else figure(value)


def measure(
    options: argparse.Namespace, layers: int, name: str, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return the figures of `COLUMNS` of a strategy, on each of its ranks.

    Args:
        layers: 0 for the most whose closed forms fit the free memory of device and host.
    """
    device = device_of(group)
    off = device.type == "cuda" and name == "fsdp2"
    strategy = parse_strategy({**STRATEGIES[name], "offload": off})
    layers = layers or _most_layers(options, strategy, device)
    model, sizes = _sizes(options, layers, strategy, device)
    given = strategy, sizes, options.world_size
    form = sum(closed_form(*given).values())
    make = partial(_engine, options, layers, strategy, device, group)
    held, engine = _held(device, lambda: _train(make(), options))
    seconds = [_seconds(engine, options) for _ in range(_TIMED)]
    tokens = options.samples * options.length
    return {
        "layers": layers,
        "parameters_m": sum(p.numel() for p in model.parameters()) / 1e6,
        "device_mb": held / _MB,
        "closed_form_mb": form / _MB,
        "ratio": held / form,
        "host_memory_mb": sum(host_memory(*given).values()) / _MB,
        "tokens_per_s": tokens / statistics.median(seconds),
    }


def _sizes(
    options: argparse.Namespace, layers: int, strategy: Strategy, device: torch.device
) -> tuple[PreTrainedModel, Sizes]:
    model = _model(options, layers)
    train = Train(batch_size=options.samples, sequence_length=options.length)
    return model, sizes_of(model, strategy, train, device)


def _most_layers(options: argparse.Namespace, strategy: Strategy, device: torch.device) -> int:
    """Return how many layers fit, at most `most_layers`: closed forms are linear in them."""
    host, few, more = torch.device("cpu"), 8, 16
    on_gpu = device != host

    def needs(layers: int) -> list[int]:
        given = strategy, _sizes(options, layers, strategy, device)[1], options.world_size
        there = device_memory(*given, on_gpu), host_memory(*given) if on_gpu else {}
        return [sum(each.values()) for each in there]

    found: int = options.most_layers
    for first, second, place in zip(needs(few), needs(more), (device, host), strict=True):
        if second > first:
            free = _USED * free_bytes(place) - first
            found = min(found, few + int(free * (more - few) / (second - first)))
    return max(1, found)


def _model(options: argparse.Namespace, layers: int) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_config(options, layers))
    return model


def _config(options: argparse.Namespace, layers: int) -> Any:
    # fused attention on GPUs has heads of at most 256 elements
    heads = max(4, options.width // 64)
    return shape_config(Shape(layers, options.width, heads), _VOCABULARY, options.length, 0)


def _engine(
    options: argparse.Namespace,
    layers: int,
    strategy: Strategy,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Engine:
    model = _model(options, layers)
    weights, optimization = RandomWeights(model, 0), Optimization(0.1, 1.0)
    return build_engine(model, strategy, optimization, group, weights=weights, device=device)


def _batch(options: argparse.Namespace) -> Tensor:
    return torch.randint(_VOCABULARY, (options.samples, options.length + 1))


def _train(engine: Engine, options: argparse.Namespace) -> Engine:
    """Train until memory peaks: the first step allocates optimizer states, the second has all."""
    for _ in range(_UNTIMED):
        engine.step([_batch(options)], 1e-4)
    return engine


def _seconds(engine: Engine, options: argparse.Namespace) -> float:
    batch, start = _batch(options), time.perf_counter()
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
