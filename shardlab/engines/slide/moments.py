"""The moments of AdamW, with their update or in a file between updates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running
from shardlab.engines.activations.files import FileMedium
from shardlab.engines.activations.media import Place, blocks

_KINDS = 2


class Moments(NamedTuple):
    """Of one unit: vectors of as many elements, which an update writes to."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class MomentStore(ABC):
    """The moments of units, zeros at first.

    Whoever updates a unit loads its moments, writes to them and stores them; what was loaded is not
    touched after that. One thread at a time calls.
    """

    def prefetch(self, unit: str) -> None:  # noqa: B027  (memory has no need)
        """Lets the moments come while others are updated."""

    @abstractmethod
    def load(self, unit: str) -> Moments:
        """As they were last stored.

        Raises:
            OSError: they did not come, or others did not leave.
        """

    @abstractmethod
    def store(self, unit: str) -> None:
        """Keeps what was loaded, with all that was written to it.

        Raises:
            OSError, UserError: moments that were stored before did not leave.
        """

    @abstractmethod
    def close(self) -> None:
        """Returns when nothing is under way; the moments are gone."""


class MemoryMoments(MomentStore):
    """In main memory all the time.

    Args:
        sizes: elements of each unit.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> None:
        self._moments = {
            unit: Moments(*torch.zeros(_KINDS, size, dtype=dtype)) for unit, size in sizes.items()
        }

    def load(self, unit: str) -> Moments:  # noqa: D102
        return self._moments[unit]

    def store(self, unit: str) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        self._moments.clear()


class FileMoments(MomentStore):
    """In a file without a name; memory holds those that are loaded, come or leave.

    Room for all is reserved at once, so that no update finds the disk full.

    Args:
        sizes: elements of each unit.

    Raises:
        UserError: nothing can be written in `folder`, or not that much.
    """

    def __init__(
        self, sizes: Mapping[str, int], folder: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        self._medium = FileMedium(folder)
        self._dtype = dtype
        self._bytes = {unit: _KINDS * size * dtype.itemsize for unit, size in sizes.items()}
        self._places: dict[str, Place] = {
            unit: self._medium.reserve(size) for unit, size in self._bytes.items()
        }
        self._out, self._in = Background("store moments"), Background("load moments")
        self._stored: dict[str, Running] = {}
        self._loaded: dict[str, tuple[Tensor, Running | None]] = {}

    def prefetch(self, unit: str) -> None:  # noqa: D102
        self._out.check()
        self._in.check()
        if unit in self._loaded:
            return
        room = blocks(self._bytes[unit], torch.device("cpu"))
        if unit not in self._stored:
            self._loaded[unit] = room.zero_(), None
            return
        self._stored[unit].wait()
        self._loaded[unit] = room, self._in.start(self._places[unit].read, room)

    def load(self, unit: str) -> Moments:  # noqa: D102
        self.prefetch(unit)
        room, arrived = self._loaded[unit]
        if arrived is not None:
            arrived.wait()
        vector = room[: self._bytes[unit]].view(self._dtype)
        return Moments(*vector.view(_KINDS, -1))

    def store(self, unit: str) -> None:  # noqa: D102
        self._out.check()
        room, _ = self._loaded.pop(unit)
        self._stored[unit] = self._out.start(self._places[unit].write, room[: self._bytes[unit]])

    def close(self) -> None:  # noqa: D102
        try:
            self._out.drain()
            self._in.drain()
        finally:
            self._medium.close()
