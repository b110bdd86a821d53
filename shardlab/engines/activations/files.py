"""A file without a name whose blocks pass by the page cache."""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.engines.activations.extents import Extents
from shardlab.engines.activations.media import BLOCK, Full, Medium, Place, blocks, whole_blocks

_CHUNK = 8 << 20
"""bytes of one call: larger ones are no faster"""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
_CPU = torch.device("cpu")
_BUFFERED: set[Path] = set()
"""folders of which was said that they are written through the page cache"""


class FileMedium(Medium):
    """A file in `folder` that no directory lists, so that it is gone with the process.

    Room is reserved (fallocate) before it is used. I/O is direct; where the file system refuses
    that, it goes through the page cache, which is said once.

    Raises:
        UserError: nothing can be written in `folder`.
    """

    def __init__(self, folder: Path, device: torch.device = _CPU) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(folder)
        except OSError as error:
            if error.errno in _FULL:
                raise _full(folder, BLOCK) from error
            raise UserError(
                f"{folder}: no file can be made there ({error.strerror}): name another folder"
            ) from error
        self._closed = weakref.finalize(self, os.close, self._file)
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
            try:
                os.posix_fallocate(self._file, extents.end, more)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise _full(self._folder, more) from error
            extents.grow(more)
            start = extents.take(size)
        assert start is not None, "the end of the range is free"
        return _FilePlace(self, start, size)

    def close(self) -> None:  # noqa: D102
        self._closed()

    def free(self, start: int, size: int) -> None:
        """Takes back what `reserve` gave."""
        self._extents.give(start, size)

    def write(self, start: int, source: Tensor) -> None:
        """See `Place.write`; of one thread at a time."""
        for begin in range(0, source.numel(), _CHUNK):
            part = source[begin : begin + _CHUNK]
            self._outgoing[: part.numel()].copy_(part, non_blocking=True)
            _landed(source.device)
            whole = self._outgoing[: whole_blocks(part.numel())]
            try:
                _move(os.pwrite, self._file, whole, start + begin)
            except OSError as error:
                raise self._failed("written", error) from error

    def read(self, start: int, out: Tensor) -> None:
        """See `Place.read`; of one thread at a time."""
        for begin in range(0, out.numel(), _CHUNK):
            part = out[begin : begin + _CHUNK]
            landing = part if self._incoming is None else self._incoming[: part.numel()]
            try:
                _move(_pread, self._file, landing, start + begin)
            except OSError as error:
                raise self._failed("read", error) from error
            if landing is not part:
                part.copy_(landing, non_blocking=True)
                _landed(out.device)

    def _failed(self, what: str, error: OSError) -> Exception:
        if error.errno in _FULL:  # a file system may promise room that it does not have
            return _full(self._folder, BLOCK)
        return OSError(
            error.errno, f"a file in {self._folder} could not be {what}: {error.strerror}"
        )


class _FilePlace(Place):
    def __init__(self, medium: FileMedium, start: int, size: int) -> None:
        self._medium, self._start, self._size = medium, start, size

    def write(self, source: Tensor) -> None:
        self._medium.write(self._start, source)

    def read(self, out: Tensor) -> None:
        self._medium.read(self._start, out)

    def free(self) -> None:
        self._medium.free(self._start, self._size)


def _open(folder: Path) -> int:
    """For direct I/O, if a block can be reserved and written so; else buffered."""
    try:
        file = _nameless(folder, os.O_DIRECT)
        try:
            os.posix_fallocate(file, 0, BLOCK)
            _move(os.pwrite, file, blocks(BLOCK, _CPU).zero_(), 0)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if folder not in _BUFFERED:
            _BUFFERED.add(folder)
            say(f"{folder}: its file system refuses direct I/O: the page cache takes part")
        return _nameless(folder, 0)
    return file


def _nameless(folder: Path, flags: int) -> int:
    with suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    # not every file system has files that never had a name
    plain, name = tempfile.mkstemp(dir=folder)
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
    finally:
        os.close(plain)
        Path(name).unlink()


def _move(call: Callable[[int, memoryview, int], int], file: int, data: Tensor, start: int) -> None:
    """All of the bytes, however many one call takes or gives."""
    left = data.numpy().data
    while left:
        moved = call(file, left, start)
        if not moved:
            raise OSError(errno.EIO, "it ends too early")
        left, start = left[moved:], start + moved


def _pread(file: int, data: memoryview, start: int) -> int:
    return os.preadv(file, [data], start)


def _landed(device: torch.device) -> None:
    """Returns when what the current stream copies is there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _full(folder: Path, size: int) -> Full:
    free = shutil.disk_usage(folder).free
    return Full(
        f"{folder}: {size:,} more bytes do not fit, {free:,} are free: make room, "
        "name another folder, or let the rest stay in memory"
    )
