"""A file without a name, read and written past the page cache where the file system lets it."""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shardlab.activations.storage import BLOCK, Full, blocks
from shardlab.core.errors import UserError
from shardlab.core.progress import say

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
_CPU = torch.device("cpu")
_BUFFERED: set[Path] = set()
"""folders of which was said that they are written through the page cache"""


class NamelessFile:
    """A file in `folder` that no directory lists, so that it is gone with the last process.

    I/O is direct; where the file system refuses that, it goes through the page cache, which is said
    once.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self.descriptor = folder, descriptor
        self._closed = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls, folder: Path) -> Self:
        """A new file, empty; the folder is made if it is not there.

        Raises:
            UserError: nothing can be written in it.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, _open(folder))
        except OSError as error:
            if error.errno in _FULL:
                raise _full(folder, BLOCK) from error
            raise UserError(
                f"{folder}: no file can be made there ({error.strerror}): name another folder"
            ) from error

    def reserve(self, start: int, size: int) -> None:
        """Makes sure that bytes can be written; new ones are zero.

        Raises:
            Full: they cannot.
        """
        try:
            os.posix_fallocate(self.descriptor, start, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _full(self.folder, size) from error

    def write(self, start: int, source: Tensor) -> None:
        """Takes uint8 of host memory: whole blocks at their places, in memory as well.

        Raises:
            Full, OSError: bytes were not taken.
        """
        try:
            _move(os.pwrite, self.descriptor, source, start)
        except OSError as error:
            raise self.failed("written", error) from error

    def read(self, start: int, out: Tensor) -> None:
        """Fills uint8 of host memory, as for `write`.

        Raises:
            OSError: bytes did not come.
        """
        try:
            _move(_pread, self.descriptor, out, start)
        except OSError as error:
            raise self.failed("read", error) from error

    def close(self) -> None:
        """Lets go of the file."""
        self._closed()

    def failed(self, what: str, error: OSError) -> Exception:
        """The error for the user."""
        if error.errno in _FULL:  # a file system may promise room that it does not have
            return _full(self.folder, BLOCK)
        return OSError(
            error.errno, f"a file in {self.folder} could not be {what}: {error.strerror}"
        )


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


def _full(folder: Path, size: int) -> Full:
    free = shutil.disk_usage(folder).free
    return Full(
        f"{folder}: {size:,} more bytes do not fit, {free:,} are free: make room, "
        "name another folder, or keep this in memory"
    )
