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
"""Run that gives the no-communication bound of a timing: every rank trains the full model."""


class TimingResult(Result):
    """Timing of one strategy; bytes are sent bytes of a rank, means over ranks and steps.

    The run is `NO_COMMUNICATION` where there is no strategy.
    """

    kind: Literal["timing", "race"] = "timing"
    parameters: int
    link_emulation: LinkEmulation
    units: list[UnitSize]
    """Units in the order of their use; parameters outside of all units come first, as `root`."""
    threads: int
    step_ms: list[float] = Field(min_length=1)
    """Step of the slowest rank, one per repetition; all runs of the timing have the same
    repetitions. With `sync`, the mean of the steps from one synchronisation to the next. Pauses are
    included: `measured_ms` has none."""
    contention: Contention | None
    """CPU time that other processes used during all repetitions of the timing; None: not counted.
    """
    bytes_raw: float
    bytes_wire: float
    interface_bytes: float | None
    """Bytes that a node sent over its emulated link, counted by the network interface, mean over
    nodes; None where nodes have no separate interfaces."""
    interface_frames: float | None
    """Frames counted by the network interface."""
    interface_bytes_inside: float | None = None
    """Bytes over loopback, between the ranks of the node."""
    ledger: dict[str, Any]
    """Bytes by kind of message, as in a training run."""
    breakdown: Breakdown
    """Breakdown of steps that were traced after the repetitions."""
    losses: list[Finite] = []
    """Losses of the first steps of a race, from the same weights and batches, in nats per token,
    means over the ranks. Strategies with the same numerics have the same losses, up to the rounding
    of sums."""

    def measured_ms(self) -> list[float]:
        """Return `step_ms` with NaN where the machine paused; all figures leave pauses out."""
        paused = pauses(self.step_ms)
        return [
            math.nan if is_pause else t for t, is_pause in zip(self.step_ms, paused, strict=True)
        ]


def shares_cores(run: TimingResult) -> bool:
    """Return whether the ranks had less than a core for each of their threads."""
    return bool(run.world_size * run.threads > run.host["cores"])


def machine_name(host: Mapping[str, Any], torch: str) -> str:
    """Return processor, cores, GPUs and version of torch in words; steps are comparable only where
    these are equal."""
    named = [f"{count} {name}" for name, count in Counter(host["gpus"]).items()]
    return ", ".join([host["cpu"], f"{host['cores']} cores", *named, f"torch {torch}"])


def machines(runs: Iterable[TimingResult]) -> dict[str, list[str]]:
    """Return the names of the timings that each machine measured, by machine."""
    by_machine: dict[str, dict[str, None]] = {}
    for run in runs:
        by_machine.setdefault(machine_name(run.host, run.torch), {})[run.timing] = None
    return {machine: [*timings] for machine, timings in by_machine.items()}


def scaling_efficiency(timed: Iterable[TimingResult], trained: Result) -> float | None:
    """Return the tokens per second and rank, over the tokens per second of one rank.

    Args:
        timed: runs of all timings.
        trained: training run that gives strategy, ranks, link and micro-batches.

    Returns:
        None where they were not timed on its ranks and link, or not on one rank.
    """
    key = trained.strategy_hash, trained.accumulation
    runs = [run for run in timed if (run.strategy_hash, run.accumulation) == key]
    setting = trained.world_size, trained.link
    single = [run for run in runs if run.world_size == 1 and run.bits_per_second is None]
    several = [run for run in runs if (run.world_size, run.link) == setting]
    if not single or not several:
        return None
    # with equal batches of a rank, this is the ratio of mean step times
    single_ms, several_ms = (
        statistics.fmean(t for t in run.measured_ms() if not math.isnan(t)) / run.tokens_of_rank
        for run in (single[0], several[0])
    )
    return single_ms / several_ms


BLOCK = 10
"""Number of repetitions between two looks at the step times."""


class RaceDecision(NamedTuple):
    """Decision after a look at the step times of a race."""

    stop: str | None = None
    """Why the race ends; None: it goes on."""
    leave: tuple[str, ...] = ()
    """Challengers that leave the race."""


class Race(Document):
    """Outcome of a race.

    No result has a memory peak, since all runs of a race share processes.
    """

    name: str
    incumbent: str
    reason: str
    """Why the race ended."""
    seconds: float
    """Duration, failed attempts included."""
    runs: list[TimingResult]
    """Timings of arms that did not fail, and of steps without communication. An arm that left has
    only the first repetitions. Empty where no race took place."""
    failures: list[Failure] = []
    """Failures of arms."""

    def failure(self, run: str) -> Failure | None:
        """Return the failure of a run; None where it did not fail or did not race."""
        return next((failure for failure in self.failures if failure.run == run), None)
