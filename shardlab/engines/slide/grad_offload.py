"""Off-load of gradients: from the device to buffers in host memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.comm.background import Running
from shardlab.comm.collective import Collective
from shardlab.engines.scheduling import VectorPool
from shardlab.engines.slide.copies import NodeContext
from shardlab.engines.slide.rank_progress import REDUCED, UPDATED, RankProgress
from shardlab.engines.slide.shared_memory import NodeMemory
from shardlab.engines.slide.unit import SlideUnit, own_vector
from shardlab.models.memory import KeptGradients, slot_sizes

_PARTS = 4
"""that a unit is off-loaded in, about: more would cost the training thread what they hide"""


class GradBuffer(NamedTuple):
    """Host memory for the gradients of one unit in one backward pass."""

    vectors: Sequence[Tensor]
    """one for each rank, or one of which each has its chunk"""
    own: Tensor
    """the vector that this rank writes to"""
    number: int
    """counts the unit's buffers, this one included; the same on all ranks"""
    updates: int
    """of this unit, that have begun before"""
    free_after: tuple[str, int, int] | None
    """event, unit and step that readers publish when they are done with its previous contents"""


class _Slot:
    """Vectors for one unit at a time."""

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.vectors = vectors
        self.unit: SlideUnit | None = None
        """that used it last"""


class GradBuffers:
    """Assignment of host memory to units' gradients, again for every micro-batch.

    Where gradients stay as they arrive, a unit has memory of its own. Else units share a few slots,
    and the root has one more. The slot of a unit is the same on all ranks; it is free when all
    ranks that read it have applied, or added up, what another unit had there.

    Ranks cannot deadlock. Units are off-loaded in one order on all ranks, the root last,
    micro-batch after micro-batch (`Schedule` sees to it), and are added up and applied in that
    order. A buffer waits for what is earlier in this order, and so does all else that lanes wait
    for: the first of what is not yet done waits for nothing. If a unit were late on one rank alone,
    the next ones there would wait for slots that others free only after the late one.

    Args:
        units: those with a trained part, and the root first.
        count: vectors of a slot: one for each rank, or one of which each has its chunk.
        sums: ranks read each other's vectors.
    """

    def __init__(
        self, units: Sequence[SlideUnit], rank: int, keeping: KeptGradients, count: int, sums: bool
    ) -> None:
        self._units, self._rank, self._keeping = units, rank, keeping
        self._order = {unit.index: place for place, unit in enumerate(units)}
        self._dtype = units[0].precision.offload
        root, *others = [unit.size for unit in units]
        self._sizes = [] if keeping == "arrived" else slot_sizes(root, others)
        self._count = count
        # sums of whole vectors are added up by each rank for itself
        self._readers = None if sums and keeping != "sums" else [rank]
        self._slots: list[_Slot] = []
        self._numbers: Counter[int] = Counter()
        self._progress: RankProgress | None = None

    def layout(self) -> dict[str, int]:
        """Return the bytes of each region of host memory."""
        return {
            _region(slot, number): size * self._dtype.itemsize
            for slot, size in enumerate(self._sizes)
            for number in range(self._count)
        }

    def map(self, memory: NodeMemory) -> None:
        """Take the regions, after the units have taken theirs."""
        self._progress = memory.progress
        shared = [
            [memory.tensor(_region(slot, n), self._dtype, (size,)) for n in range(self._count)]
            for slot, size in enumerate(self._sizes)
        ]
        self._slots = [_Slot(vectors) for vectors in shared or [u.slots for u in self._units]]

    def own(self) -> Iterator[Tensor]:
        """Iterate over all memory that this rank's gradients are copied to."""
        for slot in self._slots:
            yield own_vector(slot.vectors, self._rank)

    def reserve(self, unit: SlideUnit) -> GradBuffer:
        """Return the next buffer of a unit, which `wait` makes free."""
        slot = self._slot(unit)
        free_after, slot.unit = self._release_event(slot.unit), unit
        self._numbers[unit.index] += 1
        vectors = [vector[: unit.size] for vector in slot.vectors]
        own, number = own_vector(vectors, self._rank), self._numbers[unit.index]
        return GradBuffer(vectors, own, number, unit.updates, free_after)

    def wait(self, buffer: GradBuffer) -> None:
        """Return when the buffer is free; called in the lane that fills it."""
        assert self._progress is not None
        if buffer.free_after is not None:
            self._progress.wait(*buffer.free_after, self._readers)

    def _slot(self, unit: SlideUnit) -> _Slot:
        """Return a unit's slot, another one than its neighbours have."""
        place = self._order[unit.index]
        if len(self._slots) == len(self._units) or place == 0:
            return self._slots[place]
        return self._slots[1 + place % (len(self._slots) - 1)]

    def _release_event(self, unit: SlideUnit | None) -> tuple[str, int, int] | None:
        """Return what is published when the last buffer of a unit has been read."""
        if unit is None:
            return None
        if self._keeping in ("sums", "totals"):
            return REDUCED, unit.index, self._numbers[unit.index]
        return UPDATED, unit.index, unit.updates


def _region(slot: int, number: int) -> str:
    return f"/gradients{slot}.{number}"


Receive = Callable[[SlideUnit, Running, GradBuffer, bool, bool], None]
"""takes a unit, its copy to host memory, the buffer, and whether the micro-batch is the first and
whether it is the last of the step"""


@dataclass
class _Offload:
    """A unit that is being off-loaded."""

    unit: SlideUnit
    vector: Tensor
    buffer: GradBuffer
    filled: list[slice] = field(default_factory=list)
    """parts of the vector"""
    last: Running | None = None
    """copies the last of them"""


class GradOffload:
    """Copies of units' gradients to host memory, one unit after another.

    Args:
        receive: called for each unit whose copies have been queued.
        reduce: ranks reduce on the device, when all gradients of a unit are there, and each copies
            its chunk of the mean; None: each copies its whole vector, in parts as they are there.
        dtype: of gradients in these copies.
    """

    def __init__(
        self,
        context: NodeContext,
        buffers: GradBuffers,
        receive: Receive,
        reduce: Collective | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._context, self._buffers = context, buffers
        self._receive, self._reduce = receive, reduce
        self._dtype, self._device = dtype, device
        self._vectors = VectorPool(dtype, device)
        self._current: _Offload | None = None
        self._uncollected = 0
        """gradients of the next unit that have not been collected yet"""

    def advance(self, unit: SlideUnit) -> None:
        """Count one more gradient of the next unit; `start` takes what this leaves behind."""
        self._uncollected += 1
        if _PARTS * self._uncollected >= len(unit.shapes):
            self._collect(unit)

    def start(self, unit: SlideUnit, first: bool, last: bool) -> None:
        """Off-load the gradients of a unit: those that are there, and zeros for the others.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        current = self._collect(unit)
        self._current = None
        for gap in _gaps(current.filled, unit.size):
            current.vector[gap].zero_()
            self._take(current, gap)
        if self._reduce is not None:
            move = self._reduce_and_copy
            current.last = self._context.start_out(move, unit, current.vector, current.buffer)
        assert current.last is not None, "a unit has at least one part"
        # the vector is used again, but not before its last part was read
        self._vectors.release_after(current.last, current.vector)
        self._receive(unit, current.last, current.buffer, first, last)

    def _collect(self, unit: SlideUnit) -> _Offload:
        if self._current is None:
            vector = self._vectors.acquire(unit.size)
            self._current = _Offload(unit, vector, self._buffers.reserve(unit))
        assert self._current.unit is unit, "one unit is off-loaded after another"
        self._uncollected = 0
        for part in unit.collect(self._current.vector):
            self._take(self._current, part)
        return self._current

    def _take(self, offload: _Offload, part: slice) -> None:
        """Note a part of the vector as filled, and copy it where ranks do not reduce first."""
        offload.filled.append(part)
        if self._reduce is None:
            source, copy = offload.vector[part], self._copy_part
            before = offload.last
            offload.last = self._context.start_out(copy, offload.buffer, part, source, before)

    def _copy_part(
        self, buffer: GradBuffer, part: slice, source: Tensor, before: Running | None
    ) -> None:
        if before is not None:
            before.wait()  # has ended, as lanes keep their order; raises its error
        self._buffers.wait(buffer)
        self._context.copies.copy(buffer.own[part], source)

    def _reduce_and_copy(self, unit: SlideUnit, vector: Tensor, buffer: GradBuffer) -> None:
        assert self._reduce is not None
        chunk = torch.empty(unit.chunk, dtype=self._dtype, device=self._device)
        self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
        self._buffers.wait(buffer)
        self._context.copies.copy(buffer.own[unit.own], chunk)


def _gaps(parts: Sequence[slice], size: int) -> Iterator[slice]:
    """Iterate over what parts of a vector leave out."""
    edges = sorted((part.start, part.stop) for part in parts)
    for (_, begin), (end, _) in pairwise([(0, 0), *edges, (size, size)]):
        if begin < end:
            yield slice(begin, end)
