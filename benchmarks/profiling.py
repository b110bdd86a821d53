"""Cost of observing a step: the profiler, the ledger, the labels of units.

    python -m benchmarks.profiling [STRATEGY ...] [--preset NAME] [--repetitions R] [--work FOLDER]

One run, real engines on gloo ranks. The ways of doing a step are interleaved in an order that
rotates. A ratio is that of a step to the plain step of the same repetition; the table has the
median with the quartiles. Plain is what a timed step is: with counting and labels, without the
profiler.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.common import WORK, arguments, choose, on_ranks, print_table, write_results
from benchmarks.engines import STRATEGIES
from benchmarks.traced import Trainee
from shardlab.comm import all_to_all, collective, ledger
from shardlab.config.strategy import parse_strategy
from shardlab.profiling.capture import Capture
from shardlab.report.numbers import figure

CASES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "fsdp2-int8": {"engine": "fsdp2", "gradients": {"codec": "int8:group=128"}},
}
_DEFAULT = ("ddp", "fsdp2", "fsdp2-int8", "manual")


def main() -> None:
    args = arguments(
        __doc__,
        ("strategies", "of benchmarks.engines"),
        preset="tiny",
        repetitions=40,
        world_size=2,
        work=WORK,
    )
    measured = {}
    for name in choose(args.strategies, CASES, _DEFAULT):
        work = partial(_repetitions, CASES[name], args.preset, args.repetitions)
        measured[name], *_ = on_ranks(args.world_size, work)
    write_results(args.work / "profiling.json", step_s=measured)
    rows = [[name, *_cells(repetitions)] for name, repetitions in measured.items()]
    ways = [way for way in next(iter(measured.values())) if way != "plain"]
    headings = ["strategy", "plain step, ms", *(f"{way} / plain" for way in ways)]
    title = f"{args.preset}, {args.world_size} ranks, {args.repetitions} repetitions"
    print_table(title, headings, rows)


def _repetitions(
    document: dict[str, Any], preset: str, repetitions: int, group: dist.ProcessGroup
) -> dict[str, list[float]]:
    """Return the seconds of each step, by the way in which it ran."""
    trainee = Trainee(parse_strategy(document), preset, group)

    def timed(step: Callable[[], None]) -> float:
        dist.barrier(group)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def profiled() -> float:
        with Capture(steps=1) as capture:
            for _ in range(capture.calls):
                seconds = timed(trainee.step)
                capture.step()
        return seconds

    def without(what: Callable[[], Any]) -> float:
        with what():
            return timed(trainee.step)

    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: timed(trainee.step),
        "profiled": profiled,
        "without the ledger": lambda: without(_no_ledger),
        "without labels": lambda: without(_no_labels),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(repetitions):
        for way in order:
            times[way].append(ways[way]())
        order = order[1:] + order[:1]
    return times


@contextmanager
def _no_ledger() -> Iterator[None]:
    """Disable counting of messages and timing of codecs."""
    with ExitStack() as stack:
        for owner, name in (
            (collective.Collective, "_count"),
            (all_to_all.AllToAllCollective, "_count_sent"),
            (ledger.Account, "add_time"),
        ):
            stack.enter_context(patch.object(owner, name, lambda *_, **__: None))
        yield


def _no_labels() -> Any:
    return patch.object(collective, "record_function", lambda _: nullcontext())


def _cells(times: dict[str, list[float]]) -> list[str]:
    cells = [figure(1e3 * statistics.median(times["plain"]))]
    for way, seconds in times.items():
        if way != "plain":
            ratios = [a / b for a, b in zip(seconds, times["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return cells


if __name__ == "__main__":
    main()
