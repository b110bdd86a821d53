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
    """Names of strategies; matrix: all names in `strategies`; all: all names in `strategies` and
    `timed_strategies`. `Parameters` replaces the two words by names."""
    world_size: WorldSize = 2
    """Number of ranks."""
    link: Link | None = None
    """Emulated link between ranks of this machine; null: none."""
    repetitions: Count = 10
    """Number of timed repetitions of every strategy."""
    accumulation: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Micro-batches per step; null: as in `train`. Only the time to one loss reads timings with
    another number than `train`."""
    steps: Count | None = None
    """Steps in a repetition of a strategy without `sync`; null: the smallest `sync.every` of the
    timing, or one without any `sync`."""


class Timing(Repetitions):
    """A timing, and timings with repetitions that are interleaved with its repetitions.

    A machine may drift by more than links differ; interleaved timings share the drift.
    """

    interleaved: dict[Name, Repetitions] = {}
    """Interleaved timings of other links or numbers of ranks, by name; ranks are on one machine."""
