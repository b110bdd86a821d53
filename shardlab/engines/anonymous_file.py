"""Unlinked temporary files, and the aligned buffers that direct I/O on them needs."""

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

from shardlab.core.errors import UserError
from shardlab.core.progress import say

BLOCK = 4096
"""bytes: what direct I/O wants addresses, offsets and lengths to be multiples of"""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
_CPU = torch.device("cpu")
_BUFFERED: set[Path] = set()
"""folders reported to go through the page cache"""


class StorageFull(UserError):
    """A storage has no space left."""


def whole_blocks(size: int) -> int:
    """Return the bytes of as many blocks as `size` bytes need, at least one."""
    return max(1, -(-size // BLOCK)) * BLOCK


def aligned_blocks(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size rounded up to whole blocks] that begins at a multiple of `BLOCK`."""
    whole = whole_blocks(size)
    return first_blocks(torch.empty(whole + BLOCK, dtype=torch.uint8, device=device), whole)


def first_blocks(buffer: Tensor, size: int) -> Tensor:
    """Return the first `size` bytes of a buffer that begin at a multiple of `BLOCK`."""
    begin = -buffer.data_ptr() % BLOCK
    return buffer[begin : begin + size]


class AnonymousFile:
    """A file in `folder` that no directory lists, so that it is gone with the last process.

    I/O is direct; where the file system refuses that, it goes through the page cache, and a message
    says so once.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self.descriptor = folder, descriptor
        self._closed = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Create an empty file, and the folder if it is not there.

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
        """Allocate disk space; new bytes are zero.

        Raises:
            StorageFull: there is too little.
        """
        try:
            os.posix_fallocate(self.descriptor, start, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _full(self.folder, size) from error

    def write(self, start: int, source: Tensor) -> None:
        """Write uint8 of host memory: whole blocks, aligned in the file and in memory.

        Raises:
            StorageFull, OSError: bytes could not be written.
        """
        try:
            _transfer(os.pwrite, self.descriptor, source, start)
        except OSError as error:
            raise self.failed("written", error) from error

    def read(self, start: int, out: Tensor) -> None:
        """Fill uint8 of host memory, aligned as for `write`.

        Raises:
            OSError: bytes could not be read.
        """
        try:
            _transfer(_pread, self.descriptor, out, start)
        except OSError as error:
            raise self.failed("read", error) from error

    def close(self) -> None:
        """Close the file, which frees it when no other process has it open."""
        self._closed()

    def failed(self, what: str, error: OSError) -> Exception:
        """Return the error for the user."""
        if error.errno in _FULL:  # a file system may promise space that it does not have
            return _full(self.folder, BLOCK)
        return OSError(
            error.errno, f"a file in {self.folder} could not be {what}: {error.strerror}"
        )


def _open(folder: Path) -> int:
    """Open a file for direct I/O, if a block can be reserved and written so; else buffered."""
    try:
        file = _open_unlinked(folder, os.O_DIRECT)
        try:  # some file systems accept the flag and refuse the first write
            os.posix_fallocate(file, 0, BLOCK)
            _transfer(os.pwrite, file, aligned_blocks(BLOCK, _CPU).zero_(), 0)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if folder not in _BUFFERED:
            _BUFFERED.add(folder)
            say(f"{folder}: its file system refuses direct I/O: the page cache takes part")
        return _open_unlinked(folder, 0)
    return file


def _open_unlinked(folder: Path, flags: int) -> int:
    with suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    # not every file system has O_TMPFILE
    plain, name = tempfile.mkstemp(dir=folder)
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
    finally:  # also when the flags are refused: no name may stay
        os.close(plain)
        Path(name).unlink()


def _transfer(
    call: Callable[[int, memoryview, int], int], file: int, data: Tensor, start: int
) -> None:
    """Read or write all of the bytes, in as many calls as it takes."""
    left = data.numpy().data
    while left:
        moved = call(file, left, start)
        if not moved:
            raise OSError(errno.EIO, "it ends too early")
        left, start = left[moved:], start + moved


def _pread(file: int, data: memoryview, start: int) -> int:
    return os.preadv(file, [data], start)


def _full(folder: Path, size: int) -> StorageFull:
    free = shutil.disk_usage(folder).free
    return StorageFull(
        f"{folder}: {size:,} more bytes do not fit, {free:,} are free: make room, "
        "name another folder, or keep this in memory"
    )
