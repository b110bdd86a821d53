"""Activations on disk: the rate of the store, of plain direct I/O, and the cost to a step.

    python -m benchmarks.activations [--folder FOLDER] [--preset NAME] [--repetitions R]
                                     [--work FOLDER]

One run. Rates are of the fastest of several interleaved repetitions; plain direct I/O writes
and reads the same bytes by calls of 8 MiB from and to aligned memory. Steps are of one rank, device
and disk interleaved; the median ratio of the repetitions has its quartiles.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import WORK, arguments, on_ranks, print_table, write_results
from benchmarks.speed import best_times
from shardlab.config.model_and_data import Model
from shardlab.config.strategy import parse_strategy
from shardlab.core.document import validate
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.engines.activation_stores import FileStore, StoredTensor
from shardlab.engines.anonymous_file import aligned_blocks
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.report.numbers import figure

_CPU = torch.device("cpu")
_PIECE, _TENSOR, _TENSORS = 8 << 20, 16 << 20, 24
_VOCABULARY, _LENGTH, _SAMPLES = 2048, 256, 8


def main() -> None:
    args = arguments(
        __doc__, folder=Path(".work/activations"), preset="18m", repetitions=8, work=WORK
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(args.folder)
    steps, *_ = on_ranks(1, partial(_steps, args.preset, args.repetitions), threads=2)
    rates = _rates(args.folder, 5)
    write_results(args.work / "activations.json", gb_per_s=rates, step_s=steps)
    rows = [[name, figure(rate)] for name, rate in rates.items()]
    print_table("Rates", ["what", "GB/s"], rows)
    ratios = [disk / device for device, disk in zip(steps["device"], steps["disk"], strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    cells = [figure(1e3 * statistics.median(steps[where])) for where in ("device", "disk")]
    ratio = f"{figure(middle)} ({figure(low)} to {figure(high)})"
    print_table("Steps", ["device, ms", "disk, ms", "ratio"], [[*cells, ratio]])


def _rates(folder: Path, repetitions: int) -> dict[str, float]:
    # larger than the caches, so that everything is copied from and to host memory
    whole, copy = (aligned_blocks(_TENSORS * _TENSOR, _CPU).random_() for _ in range(2))
    tensors = whole.split(_TENSOR)
    store, tickets = FileStore(folder), list[StoredTensor]()
    plain = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(plain, 0, _TENSORS * _TENSOR)

    def put() -> None:
        for ticket in tickets:
            store.drop(ticket)
        tickets[:] = [store.put(tensor) for tensor in tensors]
        store._out.drain()

    def take() -> None:
        for number in reversed(range(_TENSORS)):
            store.prefetch(tickets[max(number - 1, 0)])
            store.take(tickets[number])

    calls: dict[str, Callable[[], object]] = {
        "memcpy": partial(copy.copy_, whole),
        "direct write": partial(_direct, os.pwrite, plain, whole),
        "store: write": put,
        "direct read": partial(_direct, _pread, plain, copy),
        "store: read": take,
    }
    seconds = best_times(calls, repetitions)
    store.close()
    os.close(plain)
    return {name: _TENSORS * _TENSOR / each / 1e9 for name, each in seconds.items()}


def _direct(call: Callable[[int, Any, int], int], file: int, buffer: Tensor) -> None:
    data = buffer.numpy().data
    for start in range(0, _TENSORS * _TENSOR, _PIECE):
        assert call(file, data[start : start + _PIECE], start) == _PIECE, "a whole piece"


def _pread(file: int, data: memoryview, start: int) -> int:
    return os.preadv(file, [data], start)


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
