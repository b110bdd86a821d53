"""The moments of AdamW, in host memory or in a file between updates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.engines.slide.node_file import FilePart, NodeFile
from shardlab.transport.background import Background, Running, drain_all

KINDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """Of this rank's chunk of one unit: vectors, which an update writes to."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class MomentStore(ABC):
    """The moments of units, zeros at first.

    Whoever updates a unit loads its moments, writes to them and stores them; what was loaded is not
    touched after that. One thread at a time calls, but for `check`.
    """

    def prefetch(self, unit: str) -> None:  # noqa: B027  (memory has no need)
        """Lets the moments come while others are updated."""

    @abstractmethod
    def load(self, unit: str) -> Moments:
        """As they were last stored.

        Raises:
            OSError: they did not come, or others did not leave.
        """

    def store(self, unit: str) -> None:  # noqa: B027
        """Keeps what was loaded, with all that was written to it.

        Raises:
            OSError, UserError: moments that were stored before did not leave.
        """

    def check(self) -> None:  # noqa: B027
        """Raises what went wrong with moments on their way."""

    def drain(self) -> None:  # noqa: B027
        """Returns when nothing is on its way; raises what went wrong."""

    def refresh(self) -> None:  # noqa: B027
        """Somebody has written to the moments where they are; nothing is on its way."""

    def look(self) -> None:  # noqa: B027
        """Before somebody reads the moments where they are; nothing is on its way.

        Raises:
            UserError: they cannot be read.
        """

    def close(self) -> None:  # noqa: B027
        """Returns when nothing is on its way; nobody calls again."""


class MemoryMoments(MomentStore):
    """In host memory all the time, which somebody else gives."""

    def __init__(self, moments: Mapping[str, Moments]) -> None:
        self._moments = moments

    def load(self, unit: str) -> Moments:  # noqa: D102
        return self._moments[unit]


class FileMoments(MomentStore):
    """In a file; memory holds those of three units: one is updated, one comes and one leaves.

    Args:
        file: that `close` closes, too.
        parts: those of each unit, in the order of `Moments`.
    """

    def __init__(
        self, file: NodeFile, parts: Mapping[str, Sequence[FilePart]], dtype: torch.dtype
    ) -> None:
        self._file, self._parts, self._dtype = file, parts, dtype
        self._out, self._in = Background("store moments"), Background("load moments")
        self._loaded: dict[str, tuple[list[Tensor], Running]] = {}
        self._leaving: _Leaving | None = None
        self._spare: list[Tensor] = []

    def prefetch(self, unit: str) -> None:  # noqa: D102
        self.check()
        if unit not in self._loaded:
            buffers, leaving = self._buffers(unit), self._leaving
            after = leaving.left if leaving is not None and leaving.unit == unit else None
            self._loaded[unit] = buffers, self._in.start(self._read, unit, buffers, after)

    def load(self, unit: str) -> Moments:  # noqa: D102
        self.prefetch(unit)
        buffers, arrived = self._loaded[unit]
        arrived.wait()
        parts = zip(self._parts[unit], buffers, strict=True)
        return Moments(*(part.inside(buffer).view(self._dtype) for part, buffer in parts))

    def store(self, unit: str) -> None:  # noqa: D102
        if self._leaving is not None:
            self._leaving.left.wait()  # memory stays bounded
            self._spare = self._leaving.buffers
        buffers, _ = self._loaded.pop(unit)
        self._leaving = _Leaving(unit, buffers, self._out.start(self._write, unit, buffers))

    def check(self) -> None:  # noqa: D102
        self._out.check()
        self._in.check()

    def drain(self) -> None:  # noqa: D102
        drain_all(self._out, self._in)

    def refresh(self) -> None:  # noqa: D102
        self._loaded.clear()
        self._file.flush()

    def look(self) -> None:  # noqa: D102
        try:
            for part in chain.from_iterable(self._parts.values()):
                part.look()
        except OSError as error:
            raise UserError(
                f"slide: {error.strerror}: its moments are lost: continue from a checkpoint, on "
                "another disk or with moments: memory"
            ) from error

    def close(self) -> None:  # noqa: D102
        try:
            self.drain()
        finally:
            self._file.close()

    def _buffers(self, unit: str) -> list[Tensor]:
        """New memory costs as much as reading it: what has left gives its own."""
        parts, spare = self._parts[unit], self._spare
        self._spare = []
        if spare and all(part.fits(buffer) for part, buffer in zip(parts, spare, strict=True)):
            return spare
        return [part.buffer() for part in parts]

    def _read(self, unit: str, buffers: Sequence[Tensor], after: Running | None) -> None:
        if after is not None:
            after.wait()
        for part, buffer in zip(self._parts[unit], buffers, strict=True):
            part.read(buffer)

    def _write(self, unit: str, buffers: Sequence[Tensor]) -> None:
        for part, buffer in zip(self._parts[unit], buffers, strict=True):
            part.write(buffer)


class _Leaving(NamedTuple):
    unit: str
    buffers: list[Tensor]
    left: Running
