"""Training of a GPT-2 of 62 M parameters on one GPU: tokens/s, MFU, memory, and what was planned.

    python -m benchmarks.gpu.training STRATEGY ... [--steps N] [--seconds S] [--trace]
                                      [--out FOLDER]

Batches are text of this repository, a byte a token, 32 x 1024 tokens a step, in bf16. A step is the
median of the last three quarters; MFU counts what `flops_per_token` does, against the peak of the
device's data sheet. `shardlab plan` predicts the step and the memory of the same training.
"""

import argparse
import json
import math
import statistics
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import arguments, on_ranks
from benchmarks.gpu.figures import OUT, on_gpu, record, table_device
from benchmarks.gpu.traces import traced
from shardlab import cli
from shardlab.comm.object_collectives import device_of
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import GPT2_VOCABULARY, Model
from shardlab.predict.devices import DEVICES
from shardlab.strategy.document import parse_strategy
from shardlab.train.utilization import flops_per_token, peak_memory

TRAINING, PLANNED = "Training of 62 M parameters", "What shardlab plan says of it"
TRACES = "Where the time of a step goes that is traced"
_INT8 = {"codec": "int8:group=128", "error_feedback": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp-compiled": {"engine": "ddp", "compile": True},
    "ddp-int8": {"engine": "ddp", "gradients": _INT8},
    "fsdp2": {"engine": "fsdp2"},
    "manual": {"engine": "manual"},
    "slide": {"engine": "slide"},
}
_IN_PLANS = {"ddp": "plain", "slide": "slide"}
_RATE, _WARM_UP = 1e-3, 40


class Size(NamedTuple):
    """Sizes of the model and of a step."""

    preset: str
    samples: int
    length: int

    @classmethod
    def of_device(cls) -> "Size":
        """Return what keeps a GPU busy, or something small for a dry run."""
        return cls("8x576", 32, 1024) if on_gpu() else cls("tiny", 2, 32)


def main() -> None:
    args = arguments(
        __doc__,
        ("strategies", ", ".join(STRATEGIES)),
        steps=200 if on_gpu() else 12,
        seconds=(40.0, "after which no step begins"),
        trace=(False, "keep a trace of two steps"),
        out=OUT,
    )
    if unknown := {*args.strategies} - {*STRATEGIES}:
        raise UserError(f"{', '.join(sorted(unknown))}: not one of {', '.join(STRATEGIES)}")
    for name in args.strategies:
        (tables,) = on_ranks(1, partial(measure, args, name))
        for table, row in tables.items():
            record(args.out, table, name, row)
        assert tables[TRAINING]["loss, last"] < tables[TRAINING]["loss, first"]


def measure(
    args: argparse.Namespace, name: str, group: dist.ProcessGroup
) -> dict[str, dict[str, Any]]:
    """Train; return a row of each table."""
    size, device = Size.of_device(), device_of(group)
    preset = validate(Model, {"preset": size.preset}, "preset")
    model = build_model(preset, GPT2_VOCABULARY, size.length, 0, seed=1)
    per_token = flops_per_token(model.module, size.length)
    parameters = sum(p.numel() for p in model.module.parameters())
    optimization, strategy = Optimization(), parse_strategy(STRATEGIES[name])
    engine = build_engine(
        model.module, strategy, optimization, group, weights=model.weights, device=device
    )
    batches = text_batches(16, size)
    losses, seconds = train(engine, batches, args.steps, args.seconds)
    step = statistics.median(seconds[len(seconds) // 4 :])
    tokens = size.samples * size.length / step
    planned = planned_device(device)
    peak = DEVICES[planned].peaks["bf16"] if planned else None
    row = {
        "parameters, M": parameters / 1e6,
        "steps": len(losses),
        "step, ms": 1e3 * step,
        "tokens/s": tokens,
        "MFU, %": peak and 100 * tokens * per_token / peak,
        "memory, GB": peak_memory(device) / 1e9,
        "first step, s": seconds[0],
        "loss, first": losses[0],
        "loss, last": statistics.fmean(losses[-8:]),
    }
    tables: dict[str, dict[str, Any]] = {TRAINING: row}
    if planned and name in _IN_PLANS:
        tables[PLANNED] = compared(size, planned, _IN_PLANS[name], row)
    if args.trace:
        tables[TRACES] = traced(engine, batches, args.out / f"trace-62m-{name}.json.gz")
    return tables


def train(
    engine: Engine, batches: list[Tensor], steps: int, longest_s: float
) -> tuple[list[float], list[float]]:
    """Return loss and seconds of each step."""
    losses, seconds, end = [], [], math.inf
    for step, batch in zip(range(steps), cycle(batches), strict=False):
        start = perf_counter()
        losses.append(engine.step([batch], _RATE * min(1.0, (step + 1) / _WARM_UP)).loss)
        seconds.append(perf_counter() - start)
        if step == 0:
            end = perf_counter() + longest_s  # the first one compiles
        if perf_counter() > end:
            break
    engine.synchronize()
    return losses, seconds


def text_batches(count: int, size: Size) -> list[Tensor]:
    """Return batches of the bytes of this repository's documents and code."""
    files = [*Path("docs").rglob("*.md"), *Path("shardlab").rglob("*.py")]
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(files)), np.uint8)
    drawn = np.random.default_rng(0)
    starts = drawn.integers(len(text) - size.length - 1, size=(count, size.samples, 1))
    windows = text[starts + np.arange(size.length + 1)].astype(np.int64)
    return [*torch.from_numpy(windows)]


def compared(size: Size, device: str, name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return what `shardlab plan` predicts of a strategy, beside what was measured."""
    command = ["plan", size.preset, "--device", device, "--activation-checkpointing", "none"]
    command += ["--batch-size", str(size.samples), "--sequence-length", str(size.length), "--json"]
    printed = StringIO()
    with redirect_stdout(printed):
        cli.main(command)
    strategies = json.loads(printed.getvalue())["strategies"]
    predicted = {strategy["name"]: strategy for strategy in strategies}[name]
    memory = sum(predicted[part] for part in ("states", "activations", "window"))
    middle, low, high = (1e3 * predicted["step_s"][end] for end in ("middle", "low", "high"))
    return {
        "device": device,
        "step, ms": row["step, ms"],
        "predicted, ms": middle,
        "from": low,
        "to": high,
        "error, %": 100 * (middle / row["step, ms"] - 1),
        "memory, GB": row["memory, GB"],
        "predicted, GB": memory / 1e9,
    }


def planned_device(device: torch.device) -> str | None:
    """Return the device of `shardlab plan`, if it is one of them.

    A dry run on the CPU takes an H100, so that it does all that a run on a GPU does.
    """
    if device.type == "cpu":
        return "h100-80g"
    properties = torch.cuda.get_device_properties(device)
    return table_device(properties.name, properties.total_memory)


if __name__ == "__main__":
    main()
