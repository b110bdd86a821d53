"""Interleaved timings of the methods' steps on each link."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.islands.methods import FOLDER, METHODS, STOCK, TARGET, strategies, timed_as
from shardlab.config.machine import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Repetitions
from shardlab.config.timing_record import read_timings
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan

LINKS: dict[str, Link | None] = {
    "loopback": None,
    **{rate: Link(rate=rate) for rate in ("1gbit", "300mbit", "100mbit", "30mbit")},
}
SLOWEST = {rate: Link(rate=rate) for rate in ("2300kbit", "540kbit")}
"""on which an uncompressed exchange takes hundreds of steps: those that exchange most rarely are
timed there"""
NODES = {
    f"{rate}-nodes": Link(rate=rate, ranks_per_node=2) for rate in ("1gbit", "300mbit", "100mbit")
}
"""between two nodes of two ranks"""
_REPETITIONS = {1: 6, 4: 8, 8: 6, 32: 3}
"""by micro-batches: fewer where steps are long"""


def timing_name(accumulation: int) -> str:
    """Return the name of the timing of steps with so many micro-batches."""
    return f"{accumulation} micro-batches" if accumulation > 1 else "one micro-batch"


def timings(names: Sequence[str], link: str) -> dict[int, list[str]]:
    """Return the strategies of methods whose steps are timed on a link, by micro-batches."""
    if link in SLOWEST:
        return {1: [*rarest(names)]}
    ranks = 4 if link in NODES else 2
    found: dict[int, list[str]] = {1: [*STOCK] if ranks == 2 else []}
    for method in (METHODS[name] for name in names):
        if method.world_size == ranks:
            runs = [timed_as(method.strategy)]
            if method.strategy == METHODS[TARGET].strategy:
                runs = [*STOCK]
            found.setdefault(method.accumulation, []).extend(runs)
    return {count: [*dict.fromkeys(runs)] for count, runs in found.items()}


def rarest(names: Sequence[str]) -> dict[str, int]:
    """Return the strategies of methods that exchange most rarely, and the steps between."""
    timed = dict.fromkeys(timed_as(METHODS[name].strategy) for name in names)
    rounds = {name: sync.every for name in timed if (sync := strategies()[name].sync) is not None}
    return {name: every for name, every in rounds.items() if every == max(rounds.values())}


def time_link(params: Parameters, names: Sequence[str], name: str) -> None:
    """Time steps of methods on a link, interleaved, unless its file has those of their
    strategies."""
    output, link = timing_path(name), (LINKS | SLOWEST | NODES)[name]
    plans = [
        TimingPlan(
            timing_name(count),
            Repetitions(
                runs=tuple(runs),
                world_size=4 if name in NODES else 2,
                link=link,
                repetitions=2 if name in SLOWEST else _REPETITIONS[count],
            ),
            strategies(),
            params("train").model_copy(update={"accumulation": count}),
            params("model"),
            FOLDER / "data",
        )
        for count, runs in timings(names, name).items()
    ]
    wanted = {
        (each.name, run): each.strategies[run].hash() for each in plans for run in each.timing.runs
    }
    if output.is_file():
        records = read_timings(output, "remove it")
        found = {(run.timing, run.run): run.strategy_hash for run in records}
        if wanted.items() <= found.items():
            return
    time_strategies(plans, output)


def timing_path(link: str) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{link}.jsonl"
