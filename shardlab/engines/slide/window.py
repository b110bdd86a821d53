"""The window of a model that the device sees."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab.activations.saved import Stays
from shardlab.activations.stores import unchanged
from shardlab.engines.slide.unit import SlidUnit


class _Saved(NamedTuple):
    """A view of a parameter that backward needs, without memory."""

    unit: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Place(NamedTuple):
    """Where a unit is."""

    slot: Tensor
    updates: int
    """of the unit, that had begun when it got the slot"""


class Window:
    """K slots on the device, each for one unit at a time.

    What a unit was before its last update is not it any more: who asks does not find it.

    What autograd would keep of a slot while others use it is kept as a place in the unit, and found
    again in the slot that the unit has in backward.

    Args:
        slots: K.
        size: elements of the largest unit.
    """

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self._free = [torch.empty(size, dtype=dtype, device=device) for _ in range(slots)]
        self._units: dict[int, SlidUnit] = {}
        """by the address of the slot"""
        self._places: dict[int, _Place] = {}
        """by the index of the unit"""
        self._addresses = {slot.untyped_storage().data_ptr() for slot in self._free}
        self._device = device
        self.poison = False
        """fill what is freed with NaN: what uses it later shows"""
        self.most_alive = 0

    def has_room(self, unit: SlidUnit) -> bool:
        """Whether a unit can be taken in: there is a free slot, or its own with what it was."""
        return bool(self._free) or unit.index in self._places

    def __contains__(self, unit: SlidUnit) -> bool:
        place = self._places.get(unit.index)
        return place is not None and place.updates == unit.updates

    def alive(self) -> Sequence[SlidUnit]:
        """The units that have a slot, whatever is in it."""
        return [*self._units.values()]

    def admit(self, unit: SlidUnit) -> Tensor:
        """A slot for the unit: its vector, whatever is in it, which its parameters show."""
        assert unit not in self, f"{unit.name} is there"
        before = self._places.get(unit.index)
        slot = self._free.pop() if before is None else before.slot
        self._places[unit.index] = _Place(slot, unit.updates)
        self._units[slot.untyped_storage().data_ptr()] = unit
        self.most_alive = max(self.most_alive, len(self._units))
        vector = slot[: unit.whole]
        unit.show(vector)
        return vector

    def release(self, unit: SlidUnit) -> None:
        """The slot of the unit is free."""
        slot = self._places.pop(unit.index).slot
        del self._units[slot.untyped_storage().data_ptr()]
        unit.hide(self._device)
        if self.poison:
            slot.fill_(torch.nan)
        self._free.append(slot)

    @contextmanager
    def saving_places(self) -> Iterator[None]:
        """While the block computes, autograd saves places instead of what is in slots."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Stays | _Saved:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._addresses:
            return Stays.made_of(tensor)
        unit = self._units[address]
        assert tensor.dtype is unit.precision.computed, "a view of a parameter in another type"
        offset = int(tensor.storage_offset())
        return _Saved(unit.index, offset, tensor.shape, tensor.stride())

    def _unpack(self, saved: Stays | _Saved) -> Tensor:
        if isinstance(saved, Stays):
            return unchanged(saved.tensor, saved.version)
        assert saved.unit in self._places, "backward uses a unit that is not on the device"
        slot = self._places[saved.unit].slot
        return slot.as_strided(saved.shape, saved.stride, saved.offset)
