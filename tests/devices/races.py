"""Accesses to memory that no wait has put in an order, while everything is computed at once.

A device may do what two streams were given in any order that their waits allow. This looks at all
of these orders in one run: each access has its place in a stream, and a vector clock says which
places of other streams come before it (Fidge 1988). Two accesses to the same bytes, one of
them a write, of which neither is before the other, are a race, whatever bits this run has found.

The host comes after what it has waited for, and before what it launches from then on.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_resize = torch.UntypedStorage.resize_

Clock = dict[int, int]
"""by stream: how many of its launches are before a point"""


def join(clock: Clock, other: Clock) -> None:
    """Come after all that the other one is after."""
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


@dataclass(frozen=True)
class Access:
    begin: int
    end: int
    writes: bool
    stream: int
    count: int
    """of the launch in its stream"""
    what: str

    def before(self, clock: Clock) -> bool:
        return self.count <= clock.get(self.stream, 0)

    def overlaps(self, begin: int, end: int) -> bool:
        return self.begin < end and begin < self.end


@dataclass(eq=False)
class Block:
    """Memory of one storage, or page-locked memory."""

    begin: int
    end: int
    owner: int | None
    """the stream that allocated it, and uses it again at once when it is free; None: the host"""
    accesses: list[Access] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    """streams for whose work it is kept when it is free"""
    freed: bool = False


class Races:
    """The accesses of all streams, and what was found."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.lock = threading.RLock()
        self.host: Clock = {}
        self.clocks: dict[int, Clock] = {}
        """by stream: what its next launch comes after"""
        self._blocks: dict[int, Block] = {}
        self._page_locked: list[Block] = []
        # a storage may be freed by the garbage collector, within any line of this class
        self._freed: deque[tuple[Block, Clock]] = deque()
        self._unlocked: deque[Block] = deque()

    def launch(
        self, stream: int, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        """Note the accesses of one operation of a stream."""
        with self.lock:
            self._take_freed()
            clock = self.clocks[stream]
            join(clock, self.host)
            count = clock[stream] = clock.get(stream, 0) + 1
            for tensors, is_write in (reads, False), (writes, True):
                for tensor in tensors:
                    block = self.block(tensor, stream)
                    if block is not None:
                        new = Access(*_span(tensor), is_write, stream, count, what)
                        self._check(block, new, clock)
                        block.accesses = [a for a in block.accesses if not _hides(new, a, clock)]
                        block.accesses.append(new)

    def touch(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note that the host itself reads and writes, now; only page-locked memory matters."""
        with self.lock:
            for tensors, is_write in (reads, False), (writes, True):
                for tensor in tensors:
                    if (block := self._page_locked_block(tensor)) is not None:
                        self._check(block, Access(*_span(tensor), is_write, -1, 0, what), self.host)

    def block(self, tensor: Tensor, stream: int) -> Block | None:
        """Return the memory of a tensor; what is new belongs to the stream."""
        if (locked := self._page_locked_block(tensor)) is not None:
            return locked
        return self._storage_block(tensor.untyped_storage(), stream)

    def _storage_block(self, storage: torch.UntypedStorage, stream: int) -> Block | None:
        if not storage.nbytes():
            return None
        begin = storage.data_ptr()
        block = self._blocks.get(begin)
        if block is None:
            block = self._blocks[begin] = Block(begin, begin + storage.nbytes(), stream)
            weakref.finalize(storage, self._note_freed, block).atexit = False
        return block

    def resize(self, storage: torch.UntypedStorage, size: int, stream: int) -> None:
        """Free the memory of a storage, and allocate another one for a stream."""
        with self.lock:
            self._take_freed()
            if storage.nbytes() and (block := self._blocks.get(storage.data_ptr())) is not None:
                self._note_freed(block)
                self._take_freed()
            _resize(storage, size)
            if (block := self._storage_block(storage, stream)) is not None:
                # others may have used this memory before, in the order of the stream
                count = self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1
                new = Access(block.begin, block.end, True, stream, count, "an allocation")
                block.accesses.append(new)

    def page_lock(self, tensor: Tensor, allocated: bool = False) -> None:
        """Note page-locked memory.

        Args:
            allocated: it ends with the tensor, and is not used again before streams are done.
        """
        with self.lock:
            block = Block(*_span(tensor), None)
            self._forget()
            inside = [b for b in self._page_locked if b.begin < block.end and block.begin < b.end]
            assert not inside, "page-locked twice"
            self._page_locked.append(block)
            if allocated:
                end = weakref.finalize(tensor.untyped_storage(), self._unlocked.append, block)
                end.atexit = False

    def page_unlock(self, tensor: Tensor) -> None:
        with self.lock:
            [block] = [b for b in self._page_locked if (b.begin, b.end) == _span(tensor)]
            self._page_locked.remove(block)

    def is_page_locked(self, tensor: Tensor) -> bool:
        with self.lock:
            return self._page_locked_block(tensor) is not None

    def _page_locked_block(self, tensor: Tensor) -> Block | None:
        self._forget()
        if not self._page_locked:
            return None
        begin, end = _span(tensor)
        return next((b for b in self._page_locked if b.begin <= begin and end <= b.end), None)

    def _forget(self) -> None:
        while self._unlocked:
            self._page_locked.remove(self._unlocked.popleft())

    def _check(self, block: Block, new: Access, clock: Clock) -> None:
        for old in block.accesses:
            either = old.writes or new.writes
            if either and old.overlaps(new.begin, new.end) and not old.before(clock):
                self._report(old, f"{new.what} {_how(new)}", new.stream)

    def _report(self, old: Access, what: str, stream: int) -> None:
        other = "the host" if stream < 0 else f"stream {stream}"
        self.found[f"{old.what} {_how(old)} on stream {old.stream}, {what} on {other}"] = None

    def _note_freed(self, block: Block) -> None:
        assert block.owner is not None
        after = {**self.clocks[block.owner]}
        join(after, self.host)
        self._freed.append((block, after))

    def _take_freed(self) -> None:
        while self._freed:
            block, clock = self._freed.popleft()
            if block.freed:
                continue
            block.freed = True
            if self._blocks.get(block.begin) is block:
                del self._blocks[block.begin]
            for old in block.accesses:
                kept = old.stream in block.users or old.stream == block.owner
                if not kept and not old.before(clock):
                    self._report(old, "its memory is freed", block.owner or 0)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses from the first to after the last byte."""
    begin, numel = tensor.data_ptr(), tensor.numel()
    if not numel or tensor.is_contiguous():
        return begin, begin + numel * tensor.itemsize
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return begin, begin + (last + 1) * tensor.itemsize


def _how(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _hides(new: Access, old: Access, clock: Clock) -> bool:
    """Return whether whatever comes after the new access comes after the old one, too."""
    inside = new.begin <= old.begin and old.end <= new.end
    return inside and (new.writes or not old.writes) and old.before(clock)
