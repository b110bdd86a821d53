"""Record of a race: interleaved steps of an incumbent and its challengers, stopped when decided."""

from typing import Literal, NamedTuple

from shardlab.config.run_record import Finite
from shardlab.config.timing_record import TimedRun
from shardlab.core.document import Document

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
