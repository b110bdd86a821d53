"""Subject of a prediction: a strategy, the units it makes of a model, and the workload."""

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.config.run_record import LinkEmulation
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import TimedRun, UnitSize


class Workload(NamedTuple):
    """Facts of a step that are the same for every strategy: ranks, model, link."""

    world_size: int
    parameters: int
    """of the model"""
    accumulation: int = 1
    """micro-batches, where the strategy does not say how many"""
    threads: int = 1
    """of each rank"""
    bits_per_second: int | None = None
    """rate of the link; None: loopback"""
    delay_s: float = 0.0
    """latency of each operation on the link"""
    link_emulation: LinkEmulation = "none"
    """as in records; with `namespaces` every rank is a node"""


class Case(NamedTuple):
    """One prediction to make: the arguments of `Model.predict`."""

    strategy: CanonicalStrategy
    units: Sequence[UnitSize]
    """of the strategy, in the order of `shardlab.models.units.unit_sizes`"""
    workload: Workload


def case_of(run: TimedRun) -> Case:
    """Return what a timed run was a measurement of; reads its configuration only."""
    return Case(strategy_of(run), run.units, workload_of(run))


def workload_of(run: TimedRun) -> Workload:
    """Return the workload of a timed run."""
    return Workload(
        run.world_size,
        run.parameters,
        run.accumulation,
        run.threads,
        run.bits_per_second,
        run.delay_ms / 1e3,
        run.link_emulation,
    )


def strategy_of(run: TimedRun) -> CanonicalStrategy:
    """Return the canonical form of a run's strategy."""
    return parse_strategy(run.strategy, f"strategy of {run.run}").canonical()
