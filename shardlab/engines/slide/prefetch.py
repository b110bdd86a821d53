"""Prefetching of parameters from host memory to a window of device memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab.comm.background import Running
from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Account
from shardlab.core.errors import UserError
from shardlab.engines.activation_stores import KeptTensor, unchanged
from shardlab.engines.slide.copies import NodeContext
from shardlab.engines.slide.rank_progress import (
    BACKWARD_END,
    GATHER,
    SEQUENCE,
    UPDATED,
    RankProgress,
)
from shardlab.engines.slide.unit import SlideUnit, chunk_of


class _SavedView(NamedTuple):
    """A view of a parameter that backward needs, without memory."""

    unit: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Occupied(NamedTuple):
    """A slot with a unit in it."""

    slot: Tensor
    updates: int
    """of the unit, that had begun when it got the slot"""


class Window:
    """K slots on the device, each for one unit at a time.

    A unit whose next update has begun does not count as contained: its slot holds old parameters.

    Where autograd would save a slot that other units use before backward, it saves the unit and the
    position in it, which is looked up in the slot that the unit has in backward.

    Args:
        slots: K.
        size: elements of the largest unit.
    """

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self._free = [torch.empty(size, dtype=dtype, device=device) for _ in range(slots)]
        self._units: dict[int, SlideUnit] = {}
        """by the address of the slot"""
        self._occupied: dict[int, _Occupied] = {}
        """by the index of the unit"""
        self._addresses = {slot.untyped_storage().data_ptr() for slot in self._free}
        self._device = device
        self.poison = False
        """fill what is freed with NaN: what uses it later shows"""

    def has_room(self, unit: SlideUnit) -> bool:
        """Return whether a slot is free, or occupied by old parameters of this unit."""
        return bool(self._free) or unit.index in self._occupied

    def __contains__(self, unit: SlideUnit) -> bool:
        occupied = self._occupied.get(unit.index)
        return occupied is not None and occupied.updates == unit.updates

    def alive(self) -> Sequence[SlideUnit]:
        """Return the units that have a slot, whatever is in it."""
        return [*self._units.values()]

    def admit(self, unit: SlideUnit) -> Tensor:
        """Give a unit a slot; returns its vector, not yet filled, as whose views it is bound."""
        assert unit not in self, f"{unit.name} is there"
        before = self._occupied.get(unit.index)
        slot = self._free.pop() if before is None else before.slot
        self._occupied[unit.index] = _Occupied(slot, unit.updates)
        self._units[slot.untyped_storage().data_ptr()] = unit
        vector = slot[: unit.whole]
        unit.bind(vector)
        return vector

    def release(self, unit: SlideUnit) -> None:
        """Free the slot of a unit."""
        slot = self._occupied.pop(unit.index).slot
        del self._units[slot.untyped_storage().data_ptr()]
        unit.unbind(self._device)
        if self.poison:
            slot.fill_(torch.nan)
        self._free.append(slot)

    @contextmanager
    def saving_positions(self) -> Iterator[None]:
        """Let autograd save positions in units instead of slots, while the block computes."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> KeptTensor | _SavedView:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._addresses:
            return KeptTensor.of(tensor)
        unit = self._units[address]
        assert tensor.dtype is unit.precision.compute, "a view of a parameter in another type"
        offset = int(tensor.storage_offset())
        return _SavedView(unit.index, offset, tensor.shape, tensor.stride())

    def _unpack(self, saved: KeptTensor | _SavedView) -> Tensor:
        if isinstance(saved, KeptTensor):
            return unchanged(saved.tensor, saved.version)
        assert saved.unit in self._occupied, "backward uses a unit that is not on the device"
        slot = self._occupied[saved.unit].slot
        return slot.as_strided(saved.shape, saved.stride, saved.offset)


class Prefetcher:
    """Copies of units to the device, each as soon as its last update is done.

    Args:
        gather: ranks load their own chunks and all-gather the rest on the device; None: every rank
            loads whole units.
    """

    def __init__(self, context: NodeContext, gather: Collective | None) -> None:
        self._context, self._gather = context, gather
        self._copies, self._progress = context.copies, context.progress
        self._ledger = context.ledger
        self._rank, self._world_size = context.groups.rank, context.groups.world_size
        self._order = _GatherOrder(context.progress)

    def start(self, unit: SlideUnit, vector: Tensor, step: int | None) -> Running:
        """Fill a vector on the device, as long as the unit or as its trained part.

        Args:
            step: that uses it, and may not have begun; None if no step does.
        """
        return self._context.start_in(self._fetch, unit, vector, unit.updates, step)

    def backward_ended(self) -> None:
        """Announce the end of a backward pass; all ranks do so before any gathers again."""
        if self._gather is not None:
            self._context.start_in(self._end)

    def count_step(self, step: int) -> None:
        """Count in the ledger what was fetched for a step, all of which has arrived."""
        self._ledger.merge_step(step)

    def _fetch(self, unit: SlideUnit, vector: Tensor, updates: int, step: int | None) -> None:
        with self._ledger.step_accounts(step):
            fetch = self._load if self._gather is None else self._load_and_gather
            fetch(unit, vector, updates)

    def _load(self, unit: SlideUnit, vector: Tensor, updates: int) -> None:
        # other ranks update their chunks of what this one copies
        self._progress.wait(UPDATED, unit.index, updates)
        self._copies.copy(vector, unit.source[: vector.numel()])
        if self._world_size > 1 and unit.count:  # no rank in particular owns frozen parameters
            trained = vector[: unit.size]
            count_shared_memory(self._ledger.accounts["weights"], trained, self._world_size)

    def _load_and_gather(self, unit: SlideUnit, vector: Tensor, updates: int) -> None:
        assert self._gather is not None
        self._order.announce(GATHER, unit.index)
        both = vector.numel() > unit.size
        # chunks of the whole vector are cut elsewhere than the trained chunks that ranks update, so
        # a unit with a frozen part waits for all ranks
        self._progress.wait(UPDATED, unit.index, updates, None if both else [self._rank])
        shard = chunk_of(vector, self._rank, self._world_size)
        source = unit.source[: vector.numel()]
        self._copies.copy(shard, chunk_of(source, self._rank, self._world_size))
        # a gather that another rank does not join would hang until the timeout
        self._order.agree(GATHER, unit.index)
        self._gather.all_gather(vector, shard, unit.message_of_both if both else unit.message)

    def _end(self) -> None:
        self._order.announce(BACKWARD_END)
        self._order.agree(BACKWARD_END)


class _GatherOrder:
    """Agreement of a node's ranks on one sequence of gathers and ends of backward passes.

    A gather that another rank does not join would last until the timeout, and one that meets the
    gather of another unit would mix up parameters: all ranks agree on each event before it. Ranks
    publish its number, so one that asks late still finds out what it was.

    One lane calls.
    """

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress
        self._number = self._agreed = 0

    def announce(self, event: str, unit: int = 0) -> None:
        """Publish this rank's next event.

        Raises:
            RuntimeError: the event before has failed, so that this one is not the next.
        """
        if self._agreed < self._number:
            raise RuntimeError(f"gather {self._number} has failed")
        self._number += 1
        self._progress.publish(event, unit, self._number)
        # second: a rank that sees this number sees the event, too
        self._progress.publish(SEQUENCE, 0, self._number)

    def agree(self, event: str, unit: int = 0) -> None:
        """Return when all ranks have announced the same event.

        Raises:
            UserError: a rank has announced another one.
        """
        self._progress.wait(SEQUENCE, 0, self._number)
        others = self._progress.behind(event, unit, self._number)
        if others:
            raise UserError(
                f"slide: {others} uses other layers than this rank, or in another order, and with "
                "param_transfer: shard each gathers them from all: set param_transfer: full"
            )
        self._agreed = self._number


def count_shared_memory(account: Account, vector: Tensor, world_size: int) -> None:
    """Count a vector that ranks read from each other's memory as if it were sent."""
    moved = vector.nbytes * (world_size - 1) / world_size
    account.collectives += 1
    account.bytes_raw += moved
    account.bytes_wire += moved
