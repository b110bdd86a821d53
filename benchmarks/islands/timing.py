"""Interleaved timings of the methods' steps on each link."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.islands.methods import FOLDER, STOCK, strategies, timed_as
from shardlab.config.machine import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Repetitions
from shardlab.config.strategy import Strategy
from shardlab.config.timing_record import read_timings
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan

LINKS: dict[str, Link | None] = {
    "loopback": None,
    **{rate: Link(rate=rate) for rate in ("1gbit", "300mbit", "100mbit", "50mbit")},
}
SLOWEST = {rate: Link(rate=rate) for rate in ("2300kbit", "540kbit")}
"""on which an uncompressed exchange takes hundreds of steps: those that exchange most rarely are
timed there"""
NODES = {
    f"{rate}-nodes": Link(rate=rate, ranks_per_node=2) for rate in ("1gbit", "300mbit", "100mbit")
}
"""between two nodes of two ranks"""
_ON_NODES = ("ddp-int4", "hsdp", "hsdp-int8", "hsdp32-warm")


class Timed(NamedTuple):
    """Strategies whose steps are timed in the same repetitions."""

    name: str
    runs: tuple[str, ...]
    repetitions: int
    """fewer where one of them is long"""
    accumulation: int = 1
    world_size: int = 2


def timings(params: Parameters, link: str) -> list[Timed]:
    """Return what is timed on a link."""
    if link in SLOWEST:
        return [Timed("one micro-batch", tuple(rarest(params)), 2)]
    if link in NODES:
        return [Timed("one micro-batch", _ON_NODES, 6, world_size=4)]
    runs = tuple(dict.fromkeys(map(timed_as, params("strategies"))))
    return [
        Timed("one micro-batch", runs, 6),
        *(Timed(f"{n} micro-batches", STOCK, most, n) for n, most in ((4, 8), (8, 6), (32, 3))),
    ]


def rarest(params: Parameters) -> dict[str, int]:
    """Return the strategies that exchange most rarely, and the steps between."""
    named: dict[str, Strategy] = params("strategies")
    timed = {name: named[name].sync for name in map(timed_as, named)}
    rounds = {name: sync.every for name, sync in timed.items() if sync is not None}
    return {name: every for name, every in rounds.items() if every == max(rounds.values())}


def time_link(params: Parameters, name: str) -> None:
    """Time steps on a link, interleaved, unless its file has those of these strategies."""
    output, link = timing_path(name), (LINKS | SLOWEST | NODES)[name]
    train = params("train")
    plans = [
        TimingPlan(
            timed.name,
            Repetitions(
                runs=timed.runs,
                world_size=timed.world_size,
                link=link,
                repetitions=timed.repetitions,
            ),
            strategies(),
            train.model_copy(update={"accumulation": timed.accumulation}),
            params("model"),
            FOLDER / "data",
        )
        for timed in timings(params, name)
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
