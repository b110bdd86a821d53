"""Stores of AdamW's moments between updates: host memory, or a file."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running, drain_all
from shardlab.core.errors import UserError
from shardlab.engines.slide.shared_file import FilePart, NodeFile

KINDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """Moments of this rank's chunk of one unit, which an update writes to."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class MomentStore:
    """Moments of units, zeros at first; these are in host memory all the time.

    An update loads a unit's moments, writes to them and stores them; what was loaded is not touched
    after that. One thread at a time calls, but for `check`.
    """

    def __init__(self, moments: Mapping[str, Moments]) -> None:
        self._moments = moments

    def prefetch(self, unit: str) -> None:
        """Load moments while others are updated."""

    def load(self, unit: str) -> Moments:
        """Return moments as they were last stored.

        Raises:
            OSError: they could not be read, or others not be written.
        """
        return self._moments[unit]

    def store(self, unit: str) -> None:
        """Keep what was loaded, with all that was written to it.

        Raises:
            OSError, UserError: moments that were stored before could not be written.
        """

    def check(self) -> None:
        """Raise the error of reads and writes in the background."""

    def drain(self) -> None:
        """Return when nothing is read or written any more; raise errors."""

    def refresh(self) -> None:
        """Discard what was prefetched: the shared tensors of moments were written to.

        Nothing is being read or written.
        """

    def populate(self) -> None:
        """Prepare the shared tensors of moments for being read; nothing is being read or written.

        Raises:
            UserError: they cannot be read.
        """

    def close(self) -> None:
        """Return when nothing is read or written any more; nobody calls again."""


class FileMoments(MomentStore):
    """Moments in a file, with those of three units in memory: updated, being read, being written.

    Args:
        file: that `close` closes, too.
        parts: those of each unit, in the order of `Moments`.
    """

    def __init__(
        self, file: NodeFile, parts: Mapping[str, Sequence[FilePart]], dtype: torch.dtype
    ) -> None:
        super().__init__({})
        self._file, self._parts, self._dtype = file, parts, dtype
        self._out, self._in = Background("store moments"), Background("load moments")
        self._loaded: dict[str, tuple[list[Tensor], Running]] = {}
        self._storing: _Storing | None = None
        self._spare: list[Tensor] = []

    def prefetch(self, unit: str) -> None:  # noqa: D102
        self.check()
        if unit not in self._loaded:
            buffers, storing = self._buffers(unit), self._storing
            after = storing.written if storing is not None and storing.unit == unit else None
            self._loaded[unit] = buffers, self._in.start(self._read, unit, buffers, after)

    def load(self, unit: str) -> Moments:  # noqa: D102
        self.prefetch(unit)
        buffers, loaded = self._loaded[unit]
        loaded.wait()
        parts = zip(self._parts[unit], buffers, strict=True)
        return Moments(*(part.inside(buffer).view(self._dtype) for part, buffer in parts))

    def store(self, unit: str) -> None:  # noqa: D102
        if self._storing is not None:
            self._storing.written.wait()  # one unit at a time, so that memory stays bounded
            self._spare = self._storing.buffers
        buffers, _ = self._loaded.pop(unit)
        self._storing = _Storing(unit, buffers, self._out.start(self._write, unit, buffers))

    def check(self) -> None:  # noqa: D102
        self._out.check()
        self._in.check()

    def drain(self) -> None:  # noqa: D102
        drain_all(self._out, self._in)

    def refresh(self) -> None:  # noqa: D102
        self._loaded.clear()
        self._file.flush()

    def populate(self) -> None:  # noqa: D102
        try:
            for part in chain.from_iterable(self._parts.values()):
                part.populate_cache()
        except OSError as error:
            raise UserError(
                f"slide: {error.strerror}: its moments are lost: continue from a checkpoint, on "
                "another disk or with moments: memory"
            ) from error

    def close(self) -> None:  # noqa: D102
        try:
            self.drain()
        finally:
            self._file.close()  # also after an error: a lost disk must not keep descriptors

    def _buffers(self, unit: str) -> list[Tensor]:
        """Return buffers for a unit, used again where they fit: new pages cost as much as I/O."""
        parts, spare = self._parts[unit], self._spare
        self._spare = []
        if spare and all(part.fits(buffer) for part, buffer in zip(parts, spare, strict=True)):
            return spare
        return [part.buffer() for part in parts]

    def _read(self, unit: str, buffers: Sequence[Tensor], after: Running | None) -> None:
        if after is not None:
            after.wait()  # writes have another thread: what was stored last must be in the file
        for part, buffer in zip(self._parts[unit], buffers, strict=True):
            part.read(buffer)

    def _write(self, unit: str, buffers: Sequence[Tensor]) -> None:
        for part, buffer in zip(self._parts[unit], buffers, strict=True):
            part.write(buffer)


class _Storing(NamedTuple):
    """Moments that are being written."""

    unit: str
    buffers: list[Tensor]
    written: Running
