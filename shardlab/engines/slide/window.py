"""The window of device memory through which units are streamed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab.activations.saved import KeptTensor
from shardlab.activations.stores import unchanged
from shardlab.engines.slide.unit import SlideUnit


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
        self.most_alive = 0

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
        self.most_alive = max(self.most_alive, len(self._units))
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
