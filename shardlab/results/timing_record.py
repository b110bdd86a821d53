"""Records of interleaved timings and races: steps of several strategies on one link."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from shardlab.config.schema import Timing
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json_lines, write_json_lines
from shardlab.results.contention import Contention
from shardlab.results.interval import pauses
from shardlab.results.run_record import Breakdown, Finite, LinkEmulation, is_crash

NO_COMMUNICATION = "no communication"
"""run of a timing that gives the no-communication bound: every rank trains the whole model alone"""


class UnitSize(Document):
    """Elements that a strategy gathers or reduces in one collective."""

    name: str
    elements: int


class TimedRun(Document):
    """Timing of one strategy; bytes are those sent by a rank, means over ranks and steps."""

    timing: str
    run: str
    """name of the strategy, or `NO_COMMUNICATION`"""
    strategy: dict[str, Any] | None
    """in canonical form"""
    strategy_hash: str | None
    model: str
    parameters: int
    units: list[UnitSize]
    """in the order of their use; parameters outside of all units come first, as `root`"""
    world_size: int
    threads: int
    batch_size: int
    accumulation: int
    sequence_length: int
    link: str
    link_emulation: LinkEmulation
    bits_per_second: int | None
    """rate of the emulated link, of the slowest node"""
    delay_ms: float
    ranks_per_node: int = 1
    """ranks that share an emulated link"""
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
    """as in a record"""
    breakdown: Breakdown
    """of steps that were traced after the repetitions"""
    revision: str
    torch: str
    host: dict[str, Any]
    kernels: str
    """as in a record"""

    def measured_ms(self) -> list[float]:
        """Return `step_ms` with NaN where the machine paused: all figures are without these."""
        paused = pauses(self.step_ms)
        return [
            math.nan if is_pause else t for t, is_pause in zip(self.step_ms, paused, strict=True)
        ]


def shares_cores(run: TimedRun) -> bool:
    """Return whether the ranks had less than a core for each of their threads."""
    return bool(run.world_size * run.threads > run.host["cores"])


class CrashedRun(Document):
    """Line of a timing for a run that it left out, as ranks failed in its steps."""

    timing: str
    run: str
    crashed: str
    """one line: the error of the rank that is the cause"""


def machine_name(host: Mapping[str, Any], torch: str) -> str:
    """Return the words for a processor with its cores, the GPUs and torch: steps of others are no
    steps of this one."""
    gpus = Counter(host.get("gpus", ()))  # records of former versions have none
    named = [f"{count} {name}" for name, count in gpus.items()]
    return ", ".join([host["cpu"], f"{host['cores']} cores", *named, f"torch {torch}"])


def machines(runs: Iterable[TimedRun]) -> dict[str, list[str]]:
    """Return the names of the timings that each machine measured."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        found.setdefault(machine_name(run.host, run.torch), {})[run.timing] = None
    return {machine: [*timings] for machine, timings in found.items()}


def read_timings(path: str | Path, fix: str) -> list[TimedRun]:
    """Read the runs of one timing, without those that crashed.

    Args:
        fix: what the user should do when the file is missing or damaged.

    Raises:
        UserError: the file is missing or damaged, or a line is none.
    """
    return [run for run in _read_lines(path, fix) if isinstance(run, TimedRun)]


def _read_lines(path: str | Path, fix: str) -> list[TimedRun | CrashedRun]:
    try:
        return [
            validate(CrashedRun, line, f"{path}:{i}")
            if is_crash(line)
            else validate(TimedRun, line, f"{path}:{i}")
            for i, line in enumerate(read_json_lines(path, fix), 1)
        ]
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


def read_timing(folder: Path, name: str, timing: Timing) -> list[TimedRun]:
    """Read the runs of a timing of the parameters and of those it is interleaved with, in their
    order, without those that crashed.

    Args:
        folder: that the timing stage writes to.

    Raises:
        UserError: they are missing, or those of another timing.
    """
    path, fix = folder / f"{name}.jsonl", f"run python -m stages.timing {name}"
    lines = _read_lines(path, fix)
    crashed = {(line.timing, line.run) for line in lines if isinstance(line, CrashedRun)}
    found = [line for line in lines if isinstance(line, TimedRun)]
    parts = timing.parts(name).items()
    expected = [(part, run) for part, each in parts for run in (*each.runs, NO_COMMUNICATION)]
    timed = [run for run in expected if run not in crashed]
    if [(run.timing, run.run) for run in found] != timed or not crashed <= {*expected}:
        raise UserError(f"{path}: has other runs than timings.{name}: {fix}")
    return found


def read_all(folder: Path, timings: Mapping[str, Timing]) -> list[TimedRun]:
    """Read the runs of all timings of the parameters, by the names of these: their order there has
    no meaning."""
    return [run for name in sorted(timings) for run in read_timing(folder, name, timings[name])]


def read_crashed(folder: Path, timings: Mapping[str, Timing]) -> list[CrashedRun]:
    """Read the runs that timings of the parameters left out, as `read_all` does the others."""
    paths = {name: folder / f"{name}.jsonl" for name in sorted(timings)}
    return [
        line
        for name, path in paths.items()
        for line in _read_lines(path, f"run python -m stages.timing {name}")
        if isinstance(line, CrashedRun)
    ]


def write_timings(path: str | Path, runs: Sequence[TimedRun | CrashedRun]) -> None:
    """Write JSON lines that `read_timings` reads."""
    write_json_lines(path, [run.model_dump(mode="json") for run in runs])


def scaling_efficiency(
    timed: Iterable[TimedRun], strategy_hash: str, world_size: int, link: str
) -> float | None:
    """Return the tokens per second and rank relative to those of one rank, on the same machine.

    The batch of a rank is the same in all timings, so it is the ratio of mean step times.

    Returns:
        None where the strategy was not timed on one rank and on so many with that link.
    """
    own = [run for run in timed if run.strategy_hash == strategy_hash]
    alone = [
        run.measured_ms() for run in own if run.world_size == 1 and run.bits_per_second is None
    ]
    there = [run.measured_ms() for run in own if (run.world_size, run.link) == (world_size, link)]
    if not alone or not there:
        return None
    one, many = ([t for t in times if not math.isnan(t)] for times in (alone[0], there[0]))
    return statistics.fmean(one) / statistics.fmean(many)


BLOCK = 10
"""repetitions between two looks at the step times"""


class Ruling(NamedTuple):
    """Consequences of a look at the step times of a race."""

    stop: str | None = None
    """why the race ends; None: it goes on"""
    leave: tuple[str, ...] = ()
    """challengers that need no more steps"""


class Arm(Document):
    """One strategy of a race."""

    outcome: Literal["ok", "timeout", "crash", "memory", "diverged"]
    detail: str = ""
    """one line; empty when all went well"""
    losses: list[Finite] = []
    """of the first steps from the same weights and batches, nats per token, means over the ranks:
    strategies with the same numerics have the same ones, up to the rounding of sums"""


class Race(Document):
    """Outcome of a race.

    No arm has a memory peak: all of them live in the same processes.
    """

    name: str
    incumbent: str
    arms: dict[str, Arm]
    """by name: those that raced, and those that failed"""
    reason: str
    """why it ended"""
    seconds: float
    """with the attempts that failed"""
    runs: list[TimedRun]
    """of the arms that are ok, and of steps without communication. An arm that left has fewer
    repetitions, the first ones. Empty when no race took place"""
