"""Where gradients arrive in host memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shardlab.buffers.slide import Keeping, landing_sizes
from shardlab.engines.slide.arrivals import UPDATED
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.unit import SlidUnit, own_of

TAKEN = "taken"
"""published by each rank of a node when it has added up what arrived of a unit"""


class Turn(NamedTuple):
    """Memory for one arrival of a unit's gradients."""

    vectors: Sequence[Tensor]
    """one for each rank, or one of which each has its chunk"""
    own: Tensor
    """the one that this rank writes to"""
    number: int
    """of the arrivals of this unit, this one included; the same on all ranks"""
    updates: int
    """of this unit, that have begun before"""
    after: tuple[str, int, int] | None
    """what the ranks that read it publish when they have done with the turn before"""


class _Slot:
    """Vectors for one unit at a time."""

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.vectors = vectors
        self.unit: SlidUnit | None = None
        """that had it last"""


class Landings:
    """Gives each unit the memory that its gradients arrive in, again for every micro-batch.

    Where they stay as they arrive, a unit has memory of its own. Else a few slots serve the units
    by turns, and the root has one more. The slot of a unit is the same on all ranks; it is free
    when all ranks that read it have applied, or added up, what another unit had there.

    No circle of ranks can wait for each other. Units leave in one order on all ranks, the root
    last, micro-batch after micro-batch (`Schedule` sees to it), and are added up and applied in
    that order. A turn waits for what is earlier in it, and so does all else that lanes wait for:
    the first of what is not yet done waits for nothing. If a unit left late on one rank alone, the
    next ones there would wait for slots that others free only after the late one.

    Args:
        units: those with a trained part, and the root first.
        count: vectors of a slot: one for each rank, or one of which each has its chunk.
        sums: ranks read each other's vectors.
    """

    def __init__(
        self,
        units: Sequence[SlidUnit],
        rank: int,
        keeping: Keeping,
        count: int,
        sums: bool,
    ) -> None:
        self._units, self._rank, self._keeping = units, rank, keeping
        self._order = {unit.index: place for place, unit in enumerate(units)}
        self._dtype = units[0].precision.landed
        root, *others = [unit.size for unit in units]
        self._sizes = [] if keeping == "arrived" else landing_sizes(root, others)
        self._count = count
        # sums of whole vectors are added up by each rank for itself
        self._readers = None if sums and keeping != "sums" else [rank]
        self._slots: list[_Slot] = []
        self._numbers: Counter[int] = Counter()
        self._control: Control | None = None

    def layout(self) -> dict[str, int]:
        """Bytes of the regions of host memory."""
        return {
            _region(slot, place): size * self._dtype.itemsize
            for slot, size in enumerate(self._sizes)
            for place in range(self._count)
        }

    def map(self, memory: NodeMemory) -> None:
        """Takes its regions, after the units have taken theirs."""
        self._control = memory.control
        shared = [
            [memory.tensor(_region(slot, n), self._dtype, (size,)) for n in range(self._count)]
            for slot, size in enumerate(self._sizes)
        ]
        self._slots = [_Slot(vectors) for vectors in shared or [u.slots for u in self._units]]

    def own(self) -> Iterator[Tensor]:
        """All memory that this rank's gradients arrive in."""
        for slot in self._slots:
            yield own_of(slot.vectors, self._rank)

    def turn(self, unit: SlidUnit) -> Turn:
        """The next one of a unit."""
        slot = self._slot(unit)
        after, slot.unit = self._done(slot.unit), unit
        self._numbers[unit.index] += 1
        vectors = [vector[: unit.size] for vector in slot.vectors]
        own, number = own_of(vectors, self._rank), self._numbers[unit.index]
        return Turn(vectors, own, number, unit.updates, after)

    def wait(self, turn: Turn) -> None:
        """Returns when its memory is free; in the lane that fills it."""
        assert self._control is not None
        if turn.after is not None:
            self._control.wait(*turn.after, self._readers)

    def _slot(self, unit: SlidUnit) -> _Slot:
        """Neighbours have different ones."""
        place = self._order[unit.index]
        if len(self._slots) == len(self._units) or place == 0:
            return self._slots[place]
        return self._slots[1 + place % (len(self._slots) - 1)]

    def _done(self, unit: SlidUnit | None) -> tuple[str, int, int] | None:
        """What is published when the last turn of the unit is over."""
        if unit is None:
            return None
        if self._keeping in ("sums", "totals"):
            return TAKEN, unit.index, self._numbers[unit.index]
        return UPDATED, unit.index, unit.updates


def _region(slot: int, place: int) -> str:
    return f"/arrived{slot}.{place}"
