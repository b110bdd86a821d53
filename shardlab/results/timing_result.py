"""Results of interleaved timings and races: steps of several strategies on one link."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from shardlab.core.document import Document
from shardlab.results.contention import Contention
from shardlab.results.interval import pauses
from shardlab.results.result import (
    Breakdown,
    Failure,
    Finite,
    LinkEmulation,
    Result,
    UnitSize,
)

NO_COMMUNICATION = "no communication"
"""run of a timing that gives the no-communication bound: every rank trains the whole model alone"""


class TimingResult(Result):
    """Timing of one strategy; bytes are those sent by a rank, means over ranks and steps.

    Its run is `NO_COMMUNICATION` where it has no strategy.
    """

    kind: Literal["timing", "race"] = "timing"
    parameters: int
    link_emulation: LinkEmulation
    units: list[UnitSize]
    """in the order of their use; parameters outside of all units come first, as `root`"""
    threads: int
    step_ms: list[float] = Field(min_length=1)
    """one per repetition, of the slowest rank; repetitions are the same for all runs of the timing.
    With `sync` the mean of the steps of a round between exchanges. With pauses: see `measured_ms`
    """
    contention: Contention | None
    """CPU time that others used during all repetitions of the timing; None where it is not counted
    """
    bytes_raw: float
    bytes_wire: float
    interface_bytes: float | None
    """bytes that a node sent over its emulated link by the network interface, mean over nodes; None
    where nodes have no separate ones"""
    interface_frames: float | None
    """frames counted there"""
    interface_bytes_inside: float | None = None
    """bytes over loopback, between the ranks of the node"""
    ledger: dict[str, Any]
    """bytes by kind of message, as in a training run"""
    breakdown: Breakdown
    """breakdown of steps that were traced after the repetitions"""
    losses: list[Finite] = []
    """losses of the first steps of a race, from the same weights and batches, in nats per token,
    means over the ranks: strategies with the same numerics have the same ones, up to the rounding
    of sums"""

    def measured_ms(self) -> list[float]:
        """Return `step_ms` with NaN where the machine paused: all figures are without these."""
        paused = pauses(self.step_ms)
        return [
            math.nan if is_pause else t for t, is_pause in zip(self.step_ms, paused, strict=True)
        ]


def shares_cores(run: TimingResult) -> bool:
    """Return whether the ranks had less than a core for each of their threads."""
    return bool(run.world_size * run.threads > run.host["cores"])


def machine_name(host: Mapping[str, Any], torch: str) -> str:
    """Return the words for a processor with its cores, the GPUs and torch: steps of others are no
    steps of this one."""
    named = [f"{count} {name}" for name, count in Counter(host["gpus"]).items()]
    return ", ".join([host["cpu"], f"{host['cores']} cores", *named, f"torch {torch}"])


def machines(runs: Iterable[TimingResult]) -> dict[str, list[str]]:
    """Return the names of the timings that each machine measured."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        found.setdefault(machine_name(run.host, run.torch), {})[run.timing] = None
    return {machine: [*timings] for machine, timings in found.items()}


def scaling_efficiency(timed: Iterable[TimingResult], trained: Result) -> float | None:
    """Return the tokens per second and rank relative to those of one rank, on the same machine.

    Args:
        timed: of all timings.
        trained: training run, whose strategy, ranks, link and micro-batches count.

    Returns:
        None where these were not timed there and on one rank.
    """
    same = trained.strategy_hash, trained.accumulation
    own = [run for run in timed if (run.strategy_hash, run.accumulation) == same]
    alone = [run for run in own if run.world_size == 1 and run.bits_per_second is None]
    place = trained.world_size, trained.link
    there = [run for run in own if (run.world_size, run.link) == place]
    if not alone or not there:
        return None
    # with equal batches of a rank the ratio of mean step times
    one, many = (
        statistics.fmean(t for t in run.measured_ms() if not math.isnan(t)) / run.tokens_of_rank
        for run in (alone[0], there[0])
    )
    return one / many


BLOCK = 10
"""repetitions between two looks at the step times"""


class RaceDecision(NamedTuple):
    """Consequences of a look at the step times of a race."""

    stop: str | None = None
    """why the race ends; None: it goes on"""
    leave: tuple[str, ...] = ()
    """challengers that need no more steps"""


class Race(Document):
    """Outcome of a race.

    No result has a memory peak: all runs of a race live in the same processes.
    """

    name: str
    incumbent: str
    reason: str
    """why it ended"""
    seconds: float
    """duration, failed attempts included"""
    runs: list[TimingResult]
    """timings of what did not fail, and of steps without communication. A run that left has fewer
    repetitions, the first ones. Empty when no race took place"""
    failures: list[Failure] = []
    """what failed, with its outcome"""

    def failure(self, run: str) -> Failure | None:
        """Return how a run failed; None for one that went well, or did not race."""
        return next((failure for failure in self.failures if failure.run == run), None)
