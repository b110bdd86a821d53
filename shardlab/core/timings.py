"""What the timing of one strategy beside others found."""

from pathlib import Path
from typing import Any

from pydantic import Field

from shardlab.core.document import Document, validate
from shardlab.core.files import read_json_lines, write_json_lines
from shardlab.core.records import Breakdown, LinkEmulation

NO_COMMUNICATION = "no communication"
"""run of a timing that shows the limit: every rank trains the whole model by itself"""


class UnitSize(Document):
    """What a strategy gathers or reduces in one collective."""

    name: str
    elements: int


class TimedRun(Document):
    """One strategy of a timing; bytes are those that a rank sends, means over ranks and steps."""

    timing: str
    run: str
    """name of the strategy, or `NO_COMMUNICATION`"""
    strategy: dict[str, Any] | None
    """in its normal form"""
    strategy_hash: str | None
    model: str
    parameters: int
    units: list[UnitSize]
    """in the order of their use; what belongs to none of them comes first, as `root`"""
    world_size: int
    threads: int
    batch_size: int
    accumulation: int
    sequence_length: int
    link: str
    link_emulation: LinkEmulation
    bits_per_second: int | None
    """of the emulated link"""
    delay_ms: float
    step_ms: list[float] = Field(min_length=1)
    """one for every round, of the slowest rank; the same rounds for all runs of the timing"""
    bytes_raw: float
    bytes_wire: float
    interface_bytes: float | None
    """what the network interface counted, where every rank has one of its own"""
    ledger: dict[str, Any]
    """as in a record"""
    breakdown: Breakdown
    """of steps that were traced after the rounds"""
    revision: str
    torch: str
    host: dict[str, Any]


def read_timings(path: str | Path) -> list[TimedRun]:
    """The runs of one timing.

    Raises:
        UserError: a line that is none.
    """
    lines = read_json_lines(path)
    return [validate(TimedRun, line, f"{path}:{i}") for i, line in enumerate(lines, 1)]


def write_timings(path: str | Path, runs: list[TimedRun]) -> None:
    """JSON lines that `read_timings` reads."""
    write_json_lines(path, [run.model_dump(mode="json") for run in runs])
