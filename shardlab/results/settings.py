"""Parameters of timings."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.link import Link
from shardlab.core.types import Count, Name, WorldSize


def _names_or_word(value: Any) -> Any:
    if isinstance(value, str) and value not in ("matrix", "all"):
        raise ValueError("expected names of strategies, matrix or all")
    return value


class Repetitions(Document):
    """Interleaved steps of several strategies in the same processes, to be compared in pairs."""

    runs: Annotated[
        Annotated[tuple[Name, ...], AS_TUPLE, Field(min_length=1)] | Literal["matrix", "all"],
        BeforeValidator(_names_or_word),
    ] = "matrix"
    """names of strategies; matrix: those of `strategies`; all: those of `timed_strategies`, too.
    `Parameters` puts names in place of the words"""
    world_size: WorldSize = 2
    """number of ranks"""
    link: Link | None = None
    """emulated link between ranks of this machine; null: none"""
    repetitions: Count = 10
    """timed steps of every strategy"""
    accumulation: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """micro-batches per step; null: those of `train`. Only the time to one loss reads timings with
    another number than that of `train`"""
    steps: Count | None = None
    """steps of a repetition of a strategy without `sync`; null: as many as the shortest round
    between exchanges, one without any `sync`"""


class Timing(Repetitions):
    """A timing, and others whose repetitions take turns with its own: a machine drifts by more than
    links differ, and its drift is then the same in all of them."""

    interleaved: dict[Name, Repetitions] = {}
    """timings of other links or numbers of ranks, by name; their ranks are on one machine"""
