"""Activations on disk: the cost to a step.

    python -m benchmarks.activations [--folder FOLDER] [--preset NAME] [--repetitions R]
                                     [--work FOLDER]

Steps are of one rank, device and disk interleaved; the median ratio of the repetitions has its
quartiles.
"""

import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common import WORK, arguments, on_ranks, print_table, write_results
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import parse_strategy
from shardlab.core.document import validate
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.models.build import build_model
from shardlab.report.numbers import figure

_VOCABULARY, _LENGTH, _SAMPLES = 2048, 256, 8


def main() -> None:
    args = arguments(
        __doc__, folder=Path(".work/activations"), preset="18m", repetitions=8, work=WORK
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(args.folder)
    steps, *_ = on_ranks(1, partial(_steps, args.preset, args.repetitions), threads=2)
    write_results(args.work / "activations.json", step_s=steps)
    ratios = [disk / device for device, disk in zip(steps["device"], steps["disk"], strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    cells = [figure(1e3 * statistics.median(steps[where])) for where in ("device", "disk")]
    ratio = f"{figure(middle)} ({figure(low)} to {figure(high)})"
    print_table("Steps", ["device, ms", "disk, ms", "ratio"], [[*cells, ratio]])


def _steps(preset: str, repetitions: int, group: dist.ProcessGroup) -> dict[str, list[float]]:
    engines = {where: _engine(preset, where, group) for where in ("device", "disk")}
    batch = torch.randint(_VOCABULARY, (_SAMPLES, _LENGTH + 1))
    seconds: dict[str, list[float]] = {where: [] for where in engines}
    for done in range(repetitions + 1):
        for where, engine in engines.items():
            start = time.perf_counter()
            engine.step([batch], 1e-3)
            if done:
                seconds[where].append(time.perf_counter() - start)
    return seconds


def _engine(preset: str, where: str, group: dist.ProcessGroup) -> Engine:
    document = {"engine": "ddp", "activation_checkpointing": "full", "activations": where}
    model, weights = build_model(
        validate(Model, {"preset": preset}, "--preset"), _VOCABULARY, _LENGTH, 0, seed=1
    )
    optimization = Optimization(weight_decay=0.1, clip=1.0)
    return build_engine(model, parse_strategy(document), optimization, group, weights=weights)


if __name__ == "__main__":
    main()
