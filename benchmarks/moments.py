"""Moments on disk: updates compared with moments in memory, and with plain direct I/O.

    python -m benchmarks.moments [--folder FOLDER] [--elements E] [--repetitions R] [--work FOLDER]

Eight units of one rank are updated one after another, as the slide engine does: the moments of the
next one come and those of the last one leave meanwhile. Plain direct I/O reads or writes the same
bytes, all of a unit by one call. Parameters and gradients are one vector for all units. All ways
take their turn in every repetition; what is shown is the fastest repetition of each.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common import WORK, arguments, on_ranks, print_table, write_results
from benchmarks.speed import best_times
from shardlab.codecs.adam import Hyper, adam_
from shardlab.codecs.workers import Workers
from shardlab.engines.anonymous_file import AnonymousFile, aligned_blocks
from shardlab.engines.slide.moments import FileMoments, Moments, MomentStore
from shardlab.engines.slide.shared_file import NodeFile
from shardlab.report.numbers import figure

UNITS = [f"unit{number}" for number in range(8)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
THREADS = 2
HYPER = Hyper(1e-3, weight_decay=0.1)


def main() -> None:
    args = arguments(
        __doc__,
        folder=Path(".work/activations"),
        elements=(8, "of a unit, x 2**20"),
        repetitions=5,
        work=WORK,
    )
    size = args.elements << 20
    seconds, *_ = on_ranks(
        1, partial(_seconds, args.folder, size, args.repetitions), threads=THREADS
    )
    write_results(args.work / "moments.json", elements=size, seconds=seconds)
    rows = []
    for name, best in seconds.items():
        total = len(UNITS) * size
        moved = 2 * DTYPES[name[:4]].itemsize * total
        rows.append(
            [name, figure(1e3 * best), figure(total / best / 1e6), figure(moved / best / 1e6)]
        )
    header = ["what", "ms", "million elements/s", "MB/s each way"]
    print_table("Moments on disk", header, rows)


def _seconds(
    folder: Path, size: int, repetitions: int, group: dist.ProcessGroup
) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {}
    parameter, gradient = torch.randn(size), torch.randn(size)
    workers = Workers(THREADS)

    def updates(store: MomentStore) -> None:
        for unit, following in zip(UNITS, [*UNITS[1:], UNITS[0]], strict=True):
            moments = store.load(unit)
            store.prefetch(following)
            adam_(parameter, *moments, [gradient], HYPER, 10, workers=workers)
            store.store(unit)

    for name, dtype in DTYPES.items():
        memory = {unit: Moments(*torch.zeros(2, size, dtype=dtype)) for unit in UNITS}
        plain, buffer = _plain(folder, 2 * size * dtype.itemsize)
        calls |= {
            f"{name}: direct read": partial(_each, plain.read, buffer),
            f"{name}: direct write": partial(_each, plain.write, buffer),
            f"{name}: updates in memory": partial(updates, MomentStore(memory)),
            f"{name}: updates on disk": partial(updates, _on_disk(group, folder, size, dtype)),
        }
    return best_times(calls, repetitions)


def _plain(folder: Path, size: int) -> tuple[AnonymousFile, torch.Tensor]:
    file = AnonymousFile.create(folder)
    file.reserve(0, len(UNITS) * size)
    buffer = aligned_blocks(size, torch.device("cpu")).random_()
    _each(file.write, buffer)
    return file, buffer


def _each(call: Callable[[int, torch.Tensor], None], buffer: torch.Tensor) -> None:
    for number in range(len(UNITS)):
        call(number * buffer.numel(), buffer)


def _on_disk(group: dist.ProcessGroup, folder: Path, size: int, dtype: torch.dtype) -> FileMoments:
    each = size * dtype.itemsize
    names = {unit: (f"{unit}/m", f"{unit}/v") for unit in UNITS}
    file = NodeFile.create(group, {name: each for both in names.values() for name in both}, folder)
    parts = {unit: [file.part(name, 0, each) for name in both] for unit, both in names.items()}
    return FileMoments(file, parts, dtype)


if __name__ == "__main__":
    main()
