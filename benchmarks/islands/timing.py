"""Interleaved timings of the methods' steps on each link."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.islands.methods import FOLDER, STOCK, timed_as
from shardlab.config.machine import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Repetitions
from shardlab.config.strategy import Strategy
from shardlab.config.timing_record import read_timings
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan

LINKS = ("50mbit", "100mbit", "300mbit", "1gbit", None)
"""rates; None: loopback"""
SLOWEST = ("2300kbit", "540kbit")
"""rates at which an uncompressed exchange takes hundreds of steps: those that exchange most rarely
are timed there"""


class Timed(NamedTuple):
    """Strategies whose steps are timed in the same repetitions."""

    name: str
    runs: tuple[str, ...]
    repetitions: int
    """fewer where one of them is long"""
    accumulation: int = 1


def timings(params: Parameters, rate: str | None) -> list[Timed]:
    """Return what is timed on a link."""
    if rate in SLOWEST:
        return [Timed("one micro-batch", tuple(rarest(params)), 2)]
    runs = tuple(dict.fromkeys(map(timed_as, params("strategies"))))
    return [
        Timed("one micro-batch", runs, 8),
        *(Timed(f"{n} micro-batches", STOCK, most, n) for n, most in ((4, 8), (8, 6), (32, 3))),
    ]


def rarest(params: Parameters) -> dict[str, int]:
    """Return the strategies that exchange most rarely, and the steps between."""
    strategies: dict[str, Strategy] = params("strategies")
    timed = {name: strategies[name].sync for name in map(timed_as, strategies)}
    rounds = {name: sync.every for name, sync in timed.items() if sync is not None}
    return {name: every for name, every in rounds.items() if every == max(rounds.values())}


def time_link(params: Parameters, rate: str | None) -> None:
    """Time steps on a link, interleaved, unless its file has those of these
    strategies."""
    output = timing_path(rate)
    link = None if rate is None else Link(rate=rate)
    train, strategies = params("train"), params("strategies")
    plans = [
        TimingPlan(
            timed.name,
            Repetitions(runs=timed.runs, link=link, repetitions=timed.repetitions),
            strategies,
            train.model_copy(update={"accumulation": timed.accumulation}),
            params("model"),
            FOLDER / "data",
        )
        for timed in timings(params, rate)
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


def timing_path(rate: str | None) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{rate or 'loopback'}.jsonl"
