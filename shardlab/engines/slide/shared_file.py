"""An unnamed file that the ranks of one node share."""

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.engines.anonymous_file import BLOCK, AnonymousFile, aligned_blocks, whole_blocks
from shardlab.engines.slide.shared_memory import Regions, lay_out

_CPU = torch.device("cpu")
_READ_SIZE = 1 << 20
"""bytes that `FilePart.populate_cache` reads at a time"""


class NodeFile(Regions):
    """Regions of a file that all ranks of a node see; the kernel frees it with the last process.

    A rank reads and writes its own `part` of a region by direct I/O, past the page cache. Whole
    regions are mapped as tensors, of which the page cache holds as much as fits. Both alternate:
    parts see what was written to tensors after `flush`, tensors what was written to parts when that
    call has returned.
    """

    def __init__(
        self, direct: AnonymousFile, cached: AnonymousFile, places: Mapping[str, range]
    ) -> None:
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
        """Create a zeroed file; all ranks of the group call together, with an equal layout.

        Args:
            group: of gloo, the ranks of one node that share a `NodeMemory` already.
            layout: bytes of each region, by its name.
            folder: that of the first rank counts.

        Raises:
            UserError: (on all ranks) nothing can be written there, or not that much.
        """
        places = lay_out(layout, whole_blocks)
        leads, failed = dist.get_rank(group) == 0, f"{folder}: its files cannot be shared"
        created = run_or_fail_together(
            group, failed, lambda: _new(folder, places) if leads else None
        )
        mine = None if created is None else _Address.of(created)
        address = _Address(*gather_values(mine, group)[0])
        file = run_or_fail_together(
            group, failed, lambda: cls(address.open(address.direct), address.open(0), places)
        )
        if created is not None:
            created.close()  # only now: the others opened the file through this descriptor
        return file

    def part(self, name: str, start: int, size: int) -> "FilePart":
        """Return so many bytes of a region, which no other part shares."""
        first = self._places[name].start + start
        return FilePart(self._direct, self._cached, first, size)

    def flush(self) -> None:
        """Write tensors' contents to the file and drop them from the page cache.

        Raises:
            OSError: it could not be written.
        """
        try:
            self._mapped.flush()
            # both: pages of the mapping and of the file would hide what direct I/O writes
            self._mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._cached.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._cached.failed("written", error) from error

    def close(self) -> None:
        """Close the file; tensors stay valid."""
        self._direct.close()
        self._cached.close()
        del self._mapped


class FilePart:
    """Bytes of a file that one rank reads and writes, at any offset.

    Direct I/O needs whole blocks. The ends of a part share theirs with parts of other ranks, and
    always go through the page cache.
    """

    def __init__(self, direct: AnonymousFile, cached: AnonymousFile, start: int, size: int) -> None:
        self._direct, self._cached = direct, cached
        self._start, self._size = start, size
        self._lead = start % BLOCK

    def buffer(self) -> Tensor:
        """Return uint8 of host memory for `read` and `write`, in whole blocks."""
        return aligned_blocks(self._lead + self._size, _CPU)

    def fits(self, buffer: Tensor) -> bool:
        """Return whether the buffer of another part serves this one, and is not much too large."""
        size = whole_blocks(self._lead + self._size)
        return size <= buffer.numel() <= 2 * size

    def inside(self, buffer: Tensor) -> Tensor:
        """Return uint8 [size]: the bytes of a buffer that are read and written."""
        return buffer[self._lead : self._lead + self._size]

    def read(self, buffer: Tensor) -> None:
        """Fill the buffer.

        Raises:
            OSError: bytes could not be read.
        """
        for file, piece in self._pieces():
            file.read(self._start + piece.start, self.inside(buffer)[piece])

    def write(self, buffer: Tensor) -> None:
        """Write the contents of the buffer.

        Raises:
            OSError, UserError: bytes could not be written.
        """
        for file, piece in self._pieces():
            file.write(self._start + piece.start, self.inside(buffer)[piece])

    def populate_cache(self) -> None:
        """Read the part into the page cache, where tensors find it.

        A page that cannot be read when a tensor is used would end the process (SIGBUS).

        Raises:
            OSError: bytes could not be read.
        """
        for start in range(0, self._size, _READ_SIZE):
            size = min(_READ_SIZE, self._size - start)
            self._cached.read(self._start + start, aligned_blocks(size, _CPU)[:size])

    def _pieces(self) -> Iterator[tuple[AnonymousFile, slice]]:
        """Iterate over the beginning, the whole blocks and the end, each with its file."""
        first, last = -self._start % BLOCK, self._size - (self._start + self._size) % BLOCK
        if first >= last:
            yield self._cached, slice(0, self._size)
            return
        yield self._cached, slice(0, first)
        yield self._direct, slice(first, last)
        yield self._cached, slice(last, self._size)


def _new(folder: Path, places: Mapping[str, range]) -> AnonymousFile:
    file = AnonymousFile.create(folder)
    file.reserve(0, whole_blocks(max(place.stop for place in places.values())))
    return file


class _Address(NamedTuple):
    """Path by which other ranks open a file that has no name."""

    path: str
    direct: int
    """O_DIRECT, or 0 where the file system refuses it"""
    folder: str

    @classmethod
    def of(cls, file: AnonymousFile) -> "_Address":
        direct = fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return cls(f"/proc/{os.getpid()}/fd/{file.descriptor}", direct, str(file.folder))

    def open(self, flags: int) -> AnonymousFile:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags)
        return AnonymousFile(Path(self.folder), descriptor)
