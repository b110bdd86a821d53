"""Parameters of timings."""

from collections.abc import Mapping
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

    def parts(self, name: str) -> dict[str, Repetitions]:
        """Return all timings by name, which is this one's first; the order of the others in the
        file has no meaning."""
        others = {other: self.interleaved[other] for other in sorted(self.interleaved)}
        alone = Repetitions(**{key: getattr(self, key) for key in Repetitions.model_fields})
        return {name: alone, **others}


def each_timing(timings: Mapping[str, Timing]) -> dict[str, Repetitions]:
    """Return all timings by name, those that are interleaved with others among them."""
    return {name: part for key, whole in timings.items() for name, part in whole.parts(key).items()}


def turns(timings: Mapping[str, Timing]) -> dict[str, str]:
    """Return by name of each timing the one that holds it, whose turns it takes."""
    return {part: name for name, whole in timings.items() for part in whole.parts(name)}
