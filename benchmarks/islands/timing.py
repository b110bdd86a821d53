"""Interleaved timings of the methods' steps on each link."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.islands.methods import (
    FOLDER,
    METHODS,
    STOCK,
    TARGET,
    strategies,
    sync_of,
    timed_as,
)
from shardlab.config.parameters import Parameters
from shardlab.core.link import Link
from shardlab.core.numbers import plural
from shardlab.results.files import read_results
from shardlab.results.result import only
from shardlab.results.settings import Repetitions
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan

LINKS: dict[str, Link | None] = {
    "loopback": None,
    **{rate: Link(rate=rate) for rate in ("1gbit", "300mbit", "100mbit", "30mbit")},
}
RARE = {
    "30mbit-rare": Link(rate="30mbit"),
    **{rate: Link(rate=rate) for rate in ("2300kbit", "540kbit")},
}
"""on which only parameter synchronisation is timed; on the slowest two it takes hundreds of steps
without a codec"""
_RARE_TIMED = {"30mbit-rare": (32, 20), "2300kbit": (128, 4), "540kbit": (128, 3)}
"""steps between synchronisations of what is timed there, and repetitions"""
NODES = {
    f"{rate}-nodes": Link(rate=rate, ranks_per_node=2) for rate in ("1gbit", "300mbit", "100mbit")
}
"""between two nodes of two ranks"""
_REPETITIONS = 5
_MICRO_BATCHES = 16
"""of a repetition, about: a single step would find its data in no cache, and rounds of many
steps, which end with a synchronisation, do not"""


class Steps(NamedTuple):
    """Steps that are timed together."""

    world_size: int
    accumulation: int
    """micro-batches per step"""

    def __str__(self) -> str:
        return f"{plural(self.world_size, 'rank')}, micro-batches: {self.accumulation}"


ONE = Steps(2, 1)
"""of two ranks, with one micro-batch: what the ratio of a link is measured with"""


def timings(names: Sequence[str], link: str) -> dict[Steps, list[str]]:
    """Return the strategies of methods whose steps are timed on a link.

    One device is the step without communication of one rank, which is timed beside any strategy.
    """
    if link in RARE:
        runs = exchanging_every(_RARE_TIMED[link][0], names)
        return {ONE: runs} if runs else {}
    ranks = 4 if link in NODES else 2
    timed: dict[Steps, list[str]] = {}
    for name in names:
        method, sync = METHODS[name], sync_of(name)
        if method.world_size not in (1, ranks):
            continue
        runs = [timed_as(method.strategy)]
        if method.world_size > 1 and method.strategy == METHODS[TARGET].strategy:
            runs = [*STOCK]
        if sync is not None and sync.warmup_steps:
            runs.append(warm_step(link))
        timed.setdefault(Steps(ranks, 1), [stock_of(link)])
        timed.setdefault(Steps(method.world_size, method.accumulation), []).extend(runs)
    return {steps: [*dict.fromkeys(runs)] for steps, runs in timed.items()}


def stock_of(link: str) -> str:
    """Return the strategy whose synchronisation is compared with computation on a link."""
    return "hsdp" if link in NODES else STOCK[0]


def warm_step(link: str) -> str:
    """Return the strategy whose step is that of a warm-up on a link."""
    return "hsdp-int8" if link in NODES else "ddp-int4"


def exchanging_every(steps: int, names: Sequence[str]) -> list[str]:
    """Return the strategies of methods of two ranks that synchronise every so many steps."""
    timed = dict.fromkeys(
        timed_as(METHODS[name].strategy) for name in names if METHODS[name].world_size == 2
    )
    syncs = {name: strategies()[name].sync for name in timed}
    return [name for name, sync in syncs.items() if sync is not None and sync.every == steps]


def time_link(params: Parameters, names: Sequence[str], name: str) -> None:
    """Time steps of methods on a link, interleaved, unless its file has them; with what its file
    has already, so that all are of the same repetitions."""
    output, link = timing_path(name), (LINKS | RARE | NODES)[name]
    before = valid_timings(params, name)
    wanted = timings(names, name)
    for steps, run in before:
        if run != NO_COMMUNICATION and run not in wanted.setdefault(steps, []):
            wanted[steps].append(run)
    if not wanted or all((steps, run) in before for steps in wanted for run in wanted[steps]):
        return
    plans = [
        TimingPlan(
            str(steps),
            Repetitions(
                runs=tuple(runs),
                world_size=steps.world_size,
                link=link if steps.world_size > 1 else None,
                repetitions=_RARE_TIMED[name][1] if name in RARE else _REPETITIONS,
                steps=None if name in RARE else _MICRO_BATCHES // steps.accumulation,
            ),
            strategies(),
            params("train").model_copy(update={"accumulation": steps.accumulation}),
            params("model"),
            FOLDER / "data",
        )
        for steps, runs in wanted.items()
    ]
    time_strategies(plans, output)


def valid_timings(params: Parameters, name: str) -> dict[tuple[Steps, str], TimingResult]:
    """Return the timings on a link by steps and strategy, without those of strategies, models and
    batches that are not those of the parameters any more."""
    if not timing_path(name).is_file():
        return {}
    train, named = params("train"), strategies()
    valid = {}
    for run in only(read_results(timing_path(name), "remove it"), TimingResult):
        strategy = named.get(run.run)
        same = run.run == NO_COMMUNICATION or (strategy and strategy.hash() == run.strategy_hash)
        facts = run.model, run.batch_size, run.sequence_length
        if same and facts == (params("model").name, train.batch_size, train.sequence_length):
            valid[Steps(run.world_size, run.accumulation), run.run] = run
    return valid


def timing_path(link: str) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{link}.jsonl"
