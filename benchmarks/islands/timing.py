"""Interleaved timings of the methods' steps on each link."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.islands.methods import (
    FOLDER,
    METHODS,
    STOCK,
    TARGET,
    strategies,
    sync_of,
    timed_as,
)
from shardlab.config.machine import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Repetitions
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun, read_timings
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
"""on which only rare exchanges are timed; on the slowest two an uncompressed one takes hundreds of
steps"""
_RARE_TIMED = {"30mbit-rare": (32, 20), "2300kbit": (128, 4), "540kbit": (128, 3)}
"""steps between the exchanges of what is timed there, and repetitions"""
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
    if link in RARE:
        runs = exchanging_every(_RARE_TIMED[link][0], names)
        return {1: runs} if runs else {}
    ranks = 4 if link in NODES else 2
    found: dict[int, list[str]] = {}
    for name in names:
        method, sync = METHODS[name], sync_of(name)
        if method.world_size != ranks:
            continue
        runs = [timed_as(method.strategy)]
        if method.strategy == METHODS[TARGET].strategy:
            runs = [*STOCK]
        if sync is not None and sync.warmup_steps:
            runs.append(warm_step(link))
        found.setdefault(1, [stock_of(link)])
        found.setdefault(method.accumulation, []).extend(runs)
    return {count: [*dict.fromkeys(runs)] for count, runs in found.items()}


def stock_of(link: str) -> str:
    """Return the strategy whose synchronisation is compared with computation on a link."""
    return "hsdp" if link in NODES else STOCK[0]


def warm_step(link: str) -> str:
    """Return the strategy whose step is that of a warm-up on a link."""
    return "hsdp-int8" if link in NODES else "ddp-int4"


def exchanging_every(steps: int, names: Sequence[str]) -> list[str]:
    """Return the strategies of methods of two ranks that exchange every so many steps."""
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
    for count in {count for count, _ in before}:
        runs = [run for at, run in before if at == count and run != NO_COMMUNICATION]
        wanted[count] = [*dict.fromkeys([*wanted.get(count, []), *runs])]
    if not wanted or all((n, run) in before for n, runs in wanted.items() for run in runs):
        return
    plans = [
        TimingPlan(
            timing_name(count),
            Repetitions(
                runs=tuple(runs),
                world_size=4 if name in NODES else 2,
                link=link,
                repetitions=_RARE_TIMED[name][1] if name in RARE else _REPETITIONS[count],
            ),
            strategies(),
            params("train").model_copy(update={"accumulation": count}),
            params("model"),
            FOLDER / "data",
        )
        for count, runs in wanted.items()
    ]
    time_strategies(plans, output)


def valid_timings(params: Parameters, name: str) -> dict[tuple[int, str], TimedRun]:
    """Return the timings on a link by micro-batches and strategy, without those of strategies,
    models and batches that are not those of the parameters any more."""
    if not timing_path(name).is_file():
        return {}
    train, named = params("train"), strategies()
    found = {}
    for run in read_timings(timing_path(name), "remove it"):
        strategy = named.get(run.run)
        same = run.run == NO_COMMUNICATION or (strategy and strategy.hash() == run.strategy_hash)
        facts = run.model, run.batch_size, run.sequence_length
        if same and facts == (params("model").name, train.batch_size, train.sequence_length):
            found[run.accumulation, run.run] = run
    return found


def timing_path(link: str) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{link}.jsonl"
