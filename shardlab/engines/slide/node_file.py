"""A file that the ranks of a node share, without a name in any folder."""

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.activations.anonymous_file import NamelessFile
from shardlab.activations.storage import BLOCK, blocks, whole_blocks
from shardlab.core.errors import UserError
from shardlab.engines.slide.regions import Regions, places_of
from shardlab.transport.object_collectives import gather_values, run_or_fail_together

_CPU = torch.device("cpu")
_AT_ONCE = 1 << 20
"""bytes that are looked at"""


class NodeFile(Regions):
    """Regions of a file that all ranks of a node see; the kernel frees it with the last process.

    A rank reads and writes its own `part` of a region past the page cache. Whole regions are seen
    as tensors, of which host memory holds no more than it has room for. Both by turns: parts see
    what was written to tensors after `flush`, tensors what was written to parts when the call has
    returned.
    """

    def __init__(self, direct: NamelessFile, cached: NamelessFile, places: Mapping[str, range]):
        self._direct, self._cached = direct, cached
        total = max(place.stop for place in places.values())
        try:
            super().__init__(mmap.mmap(cached.descriptor, total), places)
        except OSError as error:
            raise UserError(
                f"{cached.folder}: its files cannot be mapped ({error.strerror}): name another "
                "folder, or keep moments in memory"
            ) from error

    @classmethod
    def create(cls, group: dist.ProcessGroup, layout: Mapping[str, int], folder: Path) -> Self:
        """Called by all ranks of the group together, with an equal layout; zeros at first.

        Args:
            group: of gloo, the ranks of one node that share a `NodeMemory` already.
            layout: bytes of each region, by its name.
            folder: that of the first rank counts.

        Raises:
            UserError: (on all ranks) nothing can be written there, or not that much.
        """
        places = places_of(layout, whole_blocks)
        leads, failed = dist.get_rank(group) == 0, f"{folder}: its files cannot be shared"
        made = run_or_fail_together(group, failed, lambda: _new(folder, places) if leads else None)
        mine = None if made is None else _as_told(made)
        path, flags, told = gather_values(mine, group)[0]

        def opened(flags: int) -> NamelessFile:
            return NamelessFile(Path(told), os.open(path, os.O_RDWR | os.O_CLOEXEC | flags))

        file = run_or_fail_together(group, failed, lambda: cls(opened(flags), opened(0), places))
        if made is not None:
            made.close()  # all have opened it
        return file

    def part(self, name: str, start: int, size: int) -> "FilePart":
        """So many bytes of a region, of which no other part has any."""
        first = self._places[name].start + start
        return FilePart(self._direct, self._cached, first, size)

    def flush(self) -> None:
        """What was written to tensors is in the file, and leaves host memory.

        Raises:
            OSError: it could not be written.
        """
        try:
            self._mapped.flush()
            self._mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._cached.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._cached.failed("written", error) from error

    def close(self) -> None:
        """Leaves the others; tensors stay as they are."""
        self._direct.close()
        self._cached.close()
        del self._mapped


class FilePart:
    """Bytes of a file that one rank reads and writes, anywhere.

    Direct I/O is for whole blocks. The ends of a part share theirs with parts of other ranks, and
    always go through the page cache.
    """

    def __init__(self, direct: NamelessFile, cached: NamelessFile, start: int, size: int) -> None:
        self._direct, self._cached = direct, cached
        self._start, self._size = start, size
        self._lead = start % BLOCK

    def buffer(self) -> Tensor:
        """uint8 of host memory for `read` and `write`, in whole blocks."""
        return blocks(self._lead + self._size, _CPU)

    def fits(self, buffer: Tensor) -> bool:
        """Whether the buffer of another part serves this one, without being much too large."""
        size = whole_blocks(self._lead + self._size)
        return size <= buffer.numel() <= 2 * size

    def inside(self, buffer: Tensor) -> Tensor:
        """uint8 [size]: the bytes of a buffer that are read and written."""
        return buffer[self._lead : self._lead + self._size]

    def read(self, buffer: Tensor) -> None:
        """Fills the buffer.

        Raises:
            OSError: bytes did not come.
        """
        for file, piece in self._pieces():
            file.read(self._start + piece.start, self.inside(buffer)[piece])

    def write(self, buffer: Tensor) -> None:
        """Takes what is in the buffer.

        Raises:
            OSError, UserError: bytes were not taken.
        """
        for file, piece in self._pieces():
            file.write(self._start + piece.start, self.inside(buffer)[piece])

    def look(self) -> None:
        """Brings the part to the page cache, where tensors find it: a page that does not come when
        a tensor is read would end the process.

        Raises:
            OSError: bytes did not come.
        """
        for start in range(0, self._size, _AT_ONCE):
            size = min(_AT_ONCE, self._size - start)
            self._cached.read(self._start + start, blocks(size, _CPU)[:size])

    def _pieces(self) -> Iterator[tuple[NamelessFile, slice]]:
        first, last = -self._start % BLOCK, self._size - (self._start + self._size) % BLOCK
        if first >= last:
            yield self._cached, slice(0, self._size)
            return
        yield self._cached, slice(0, first)
        yield self._direct, slice(first, last)
        yield self._cached, slice(last, self._size)


def _new(folder: Path, places: Mapping[str, range]) -> NamelessFile:
    file = NamelessFile.make(folder)
    file.reserve(0, whole_blocks(max(place.stop for place in places.values())))
    return file


def _as_told(file: NamelessFile) -> tuple[str, int, str]:
    """How other ranks open it: its path, the flags, and the folder."""
    direct = fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
    return f"/proc/{os.getpid()}/fd/{file.descriptor}", direct, str(file.folder)
