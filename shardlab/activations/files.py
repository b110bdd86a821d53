"""Room in a file without a name."""

from pathlib import Path

import torch
from torch import Tensor

from shardlab.activations.anonymous_file import NamelessFile
from shardlab.activations.extents import Extents
from shardlab.activations.storage import Medium, Place, blocks, whole_blocks

_CHUNK = 8 << 20
"""bytes of one call: larger ones are no faster"""
_CPU = torch.device("cpu")


class FileMedium(Medium):
    """Room in a `NamelessFile`, reserved (fallocate) before it is used.

    Raises:
        UserError: nothing can be written in `folder`.
    """

    def __init__(self, folder: Path, device: torch.device = _CPU) -> None:
        self._file = NamelessFile.make(folder)
        self._extents = Extents()
        pin = device.type == "cuda"
        # writing and reading have a thread each; pinned here, since in a step that takes long
        self._outgoing = blocks(_CHUNK, _CPU, pin)
        self._incoming = blocks(_CHUNK, _CPU, pin) if pin else None

    def reserve(self, size: int) -> Place:  # noqa: D102
        size, extents = whole_blocks(size), self._extents
        start = extents.take(size)
        if start is None:
            more = extents.lacking(size)
            self._file.reserve(extents.end, more)
            extents.grow(more)
            start = extents.take(size)
        assert start is not None, "the end of the range is free"
        return _FilePlace(self, start, size)

    def close(self) -> None:  # noqa: D102
        self._file.close()

    def free(self, start: int, size: int) -> None:
        """Takes back what `reserve` gave."""
        self._extents.give(start, size)

    def write(self, start: int, source: Tensor) -> None:
        """See `Place.write`; of one thread at a time."""
        for begin in range(0, source.numel(), _CHUNK):
            part = source[begin : begin + _CHUNK]
            self._outgoing[: part.numel()].copy_(part, non_blocking=True)
            _landed(source.device)
            self._file.write(start + begin, self._outgoing[: whole_blocks(part.numel())])

    def read(self, start: int, out: Tensor) -> None:
        """See `Place.read`; of one thread at a time."""
        for begin in range(0, out.numel(), _CHUNK):
            part = out[begin : begin + _CHUNK]
            landing = part if self._incoming is None else self._incoming[: part.numel()]
            self._file.read(start + begin, landing)
            if landing is not part:
                part.copy_(landing, non_blocking=True)
                _landed(out.device)


class _FilePlace(Place):
    def __init__(self, medium: FileMedium, start: int, size: int) -> None:
        self._medium, self._start, self._size = medium, start, size

    def write(self, source: Tensor) -> None:
        self._medium.write(self._start, source)

    def read(self, out: Tensor) -> None:
        self._medium.read(self._start, out)

    def free(self) -> None:
        self._medium.free(self._start, self._size)


def _landed(device: torch.device) -> None:
    """Returns when what the current stream copies is there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
