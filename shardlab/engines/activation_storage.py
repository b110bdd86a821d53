"""Storage for bytes that the device does not need for a while: host memory, or a file."""

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shardlab.core.device import Accelerator, accelerator_of
from shardlab.core.progress import say
from shardlab.engines.anonymous_file import (
    BLOCK,
    AnonymousFile,
    StorageFull,
    first_blocks,
    whole_blocks,
)

_CHUNK = 8 << 20
"""bytes of one read or write of a file: larger ones are no faster"""
_CPU = torch.device("cpu")


class Allocation(ABC):
    """Space for a number of bytes, which can be read as often as wanted.

    Reads and writes may only be launched, on the current stream, when the calls return. The caller
    orders them: a read begins after the write that it is to see.
    """

    @abstractmethod
    def write(self, source: Tensor) -> None:
        """Store uint8 [size] of any device.

        Raises:
            OSError, UserError: bytes could not be written.
        """

    @abstractmethod
    def read(self, out: Tensor) -> None:
        """Fill uint8 [size rounded up to whole blocks] from `aligned_blocks`.

        What is beyond `size` is undefined.

        Raises:
            OSError: bytes could not be read.
        """

    @abstractmethod
    def free(self) -> None:
        """Return the space; nothing is being read or written."""


class Storage(ABC):
    """Space that is gone with the process, however that ends."""

    @abstractmethod
    def allocate(self, size: int) -> Allocation:
        """Return space that is certain to be there.

        Raises:
            StorageFull: there is none; with the fix.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all space; no allocation is used again."""


class HostStorage(Storage):
    """Host memory, page-locked where a GPU copies from it; reused, since page-locking is slow."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self._spare: list[Tensor] = []

    def allocate(self, size: int) -> Allocation:  # noqa: D102
        fitting = [each for each in self._spare if size <= each.numel() <= 2 * size]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._spare = [each for each in self._spare if each is not buffer]
        else:
            # sizes have changed: keeping buffers of the old ones would add up
            self._spare.clear()
            buffer = host_bytes(size, self._accelerator)
        return _HostAllocation(buffer, size, self._accelerator, self._spare.append)

    def close(self) -> None:  # noqa: D102
        self._spare.clear()


class _HostAllocation(Allocation):
    def __init__(
        self,
        buffer: Tensor,
        size: int,
        accelerator: Accelerator | None,
        reuse: Callable[[Tensor], None],
    ) -> None:
        self._buffer, self._size = buffer, size
        self._accelerator, self._reuse = accelerator, reuse

    def write(self, source: Tensor) -> None:
        _copy(self._accelerator, self._buffer[: self._size], source)

    def read(self, out: Tensor) -> None:
        _copy(self._accelerator, out[: self._size], self._buffer[: self._size])

    def free(self) -> None:
        self._reuse(self._buffer)


class FallbackStorage(Storage):
    """A storage and, from when it is full, another one; a message says so once."""

    def __init__(self, first: Storage, second: Storage) -> None:
        self._first, self._second = first, second
        self._said = False

    def allocate(self, size: int) -> Allocation:  # noqa: D102
        try:
            return self._first.allocate(size)
        except StorageFull as full:
            if not self._said:
                say(f"{full}; host memory takes the rest")
                self._said = True
            return self._second.allocate(size)

    def close(self) -> None:  # noqa: D102
        self._first.close()
        self._second.close()


class FreeList:
    """First-fit allocator of a growing range; neighbouring free parts merge.

    Steps that keep the same amount, in whatever pieces, so reuse the space of the step before.
    """

    def __init__(self) -> None:
        self.end = 0
        """of the range"""
        self._free: list[tuple[int, int]] = []

    def allocate(self, size: int) -> int | None:
        """Return the start of the first free part of `size` bytes; None when there is none."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def lacking(self, size: int) -> int:
        """Return the bytes to `grow` by until `size` of them are free at the end."""
        start, free = self._free[-1] if self._free else (self.end, 0)
        return size - (free if start + free == self.end else 0)

    def grow(self, size: int) -> None:
        """Add free bytes at the end."""
        self.end += size
        self.free(self.end - size, size)

    def free(self, start: int, size: int) -> None:
        """Free what `allocate` returned."""
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for part in self._free:
            if merged and sum(merged[-1]) == part[0]:
                part = merged[-1][0], merged.pop()[1] + part[1]
            merged.append(part)
        self._free = merged


class FileStorage(Storage):
    """Space in an `AnonymousFile`, reserved (fallocate) before it is used.

    One thread at a time writes, and one reads.

    Raises:
        UserError: nothing can be written in `folder`.
    """

    def __init__(self, folder: Path, device: torch.device = _CPU) -> None:
        self.file = AnonymousFile.create(folder)
        self.space = FreeList()
        self.accelerator = accelerator_of(device)
        # writing and reading have a thread each; page-locked here, as that takes long in a step
        self.outgoing = self._buffer()
        self.incoming = None if self.accelerator is None else self._buffer()

    def allocate(self, size: int) -> Allocation:  # noqa: D102
        size, space = whole_blocks(size), self.space
        start = space.allocate(size)
        if start is None:
            more = space.lacking(size)
            self.file.reserve(space.end, more)
            space.grow(more)
            start = space.allocate(size)
        assert start is not None, "the end of the range is free"
        return _FileAllocation(self, start, size)

    def close(self) -> None:  # noqa: D102
        self.file.close()

    def _buffer(self) -> Tensor:
        return first_blocks(host_bytes(_CHUNK + BLOCK, self.accelerator), _CHUNK)


class _FileAllocation(Allocation):
    def __init__(self, storage: FileStorage, start: int, size: int) -> None:
        self._storage, self._start, self._size = storage, start, size

    def write(self, source: Tensor) -> None:
        buffer = self._storage.outgoing
        for begin in range(0, source.numel(), _CHUNK):
            part = source[begin : begin + _CHUNK]
            _copy(self._storage.accelerator, buffer[: part.numel()], part)
            self._synchronize()  # the CPU writes the bytes
            self._storage.file.write(self._start + begin, buffer[: whole_blocks(part.numel())])

    def read(self, out: Tensor) -> None:
        buffer = self._storage.incoming
        for begin in range(0, out.numel(), _CHUNK):
            part = out[begin : begin + _CHUNK]
            target = part if buffer is None else buffer[: part.numel()]
            self._storage.file.read(self._start + begin, target)
            if target is not part:
                _copy(self._storage.accelerator, part, target)
                self._synchronize()  # the next read overwrites the buffer

    def free(self) -> None:
        self._storage.space.free(self._start, self._size)

    def _synchronize(self) -> None:
        """Return when the current stream has done its copies."""
        if (accelerator := self._storage.accelerator) is not None:
            accelerator.current_stream().synchronize()


def host_bytes(size: int, accelerator: Accelerator | None) -> Tensor:
    """Return uint8 [size] of host memory, page-locked for an accelerator."""
    if accelerator is None:
        return torch.empty(size, dtype=torch.uint8)
    return accelerator.page_locked((size,), torch.uint8)


def _copy(accelerator: Accelerator | None, target: Tensor, source: Tensor) -> None:
    if accelerator is None:
        target.copy_(source)
    else:
        accelerator.copy(target, source)
