"""Memory that the ranks of one node share, without a name in any folder."""

import hashlib
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.engines.slide.control import Control, control_bytes
from shardlab.engines.slide.regions import Regions, places_of
from shardlab.environment.host import free_memory_bytes
from shardlab.transport.object_collectives import gather_values, run_or_fail_together

_PAGE = mmap.PAGESIZE
_GIB = 1 << 30
_NAME = "shardlab"
_VERSION = 1
"""of what `Control` and `_places` make of the memory"""
_CONTROL = ""
"""the place of `Control`"""
_FAILED = "slide: the ranks of a node cannot share host memory"


class NodeMemory(Regions):
    """Regions of host memory that all ranks of a node see, and their `control`.

    It has no name: the kernel frees it with the last process, however that ends, and with the last
    tensor after `close`.

    Each rank takes one of W equal parts of each region, rank after rank, from the part of the
    machine's memory that its cores are next to: give every vector that ranks update in shares a
    region of its own, and bind ranks to cores before.
    """

    control: Control

    def __init__(self, mapped: mmap.mmap, places: Mapping[str, range], control: Control) -> None:
        super().__init__(mapped, places)
        self.control = control

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup,
        layout: Mapping[str, int],
        steps: Sequence[str],
        units: int,
        timeout_s: float,
        beside: int = 0,
    ) -> Self:
        """Called by all ranks of the group together, with equal arguments; zeros at first.

        Args:
            group: of gloo, the ranks of one node (`node_groups`).
            layout: bytes of each region, by its name.
            steps: kinds of events, see `Control`.
            units: for which each of them is counted.
            beside: bytes that the ranks will take for themselves, so that there is room for them.

        Raises:
            UserError: (on all ranks) there is too little memory, or the ranks cannot share it.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        places = _places(world_size, layout, len(steps), units)
        total = _whole_pages(max(place.stop for place in places.values()))
        purpose = repr((world_size, places, tuple(steps), units))
        with ExitStack() as files:
            file = _share(group, total, beside, purpose, files)
            parts = [_part(place, rank, world_size) for place in places.values()]
            mapped = run_or_fail_together(group, _FAILED, lambda: _map(file, total, parts))
        first, pids = places.pop(_CONTROL).start, gather_values(os.getpid(), group)
        names = dist.get_process_group_ranks(group)
        given = mapped, first, rank, pids, names, steps, units, timeout_s
        # all are alive while `control` takes hold of them
        control = run_or_fail_together(group, _FAILED, lambda: Control(*given))
        return cls(mapped, places, control)

    def close(self) -> None:
        """Leaves the others; tensors stay as they are."""
        self.control.close()
        del self._mapped


def _places(world_size: int, layout: Mapping[str, int], kinds: int, units: int) -> dict[str, range]:
    """Where each region is, at whole pages; the header and `Control` are first."""
    sizes = {_CONTROL: control_bytes(world_size, kinds, units), **layout}
    return places_of(sizes, _whole_pages, _PAGE)


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _part(place: range, rank: int, world_size: int) -> range:
    """The pages of a region that this rank takes."""
    count = _whole_pages(len(place)) // _PAGE
    first, last = (place.start + count * r // world_size * _PAGE for r in (rank, rank + 1))
    return range(first, last)


def _share(
    group: dist.ProcessGroup, total: int, beside: int, purpose: str, files: ExitStack
) -> int:
    """A descriptor of one new file on all ranks, for `files` to close."""
    leads = dist.get_rank(group) == 0
    made = run_or_fail_together(
        group, _FAILED, lambda: _new_file(total, beside, files) if leads else -1
    )
    session = secrets.token_hex(16)
    pid, number, session = gather_values([os.getpid(), made, session], group)[0]
    header = hashlib.blake2b(f"{session} {_VERSION} {purpose}".encode()).digest()
    run_or_fail_together(group, _FAILED, lambda: os.pwrite(made, header, 0) if leads else None)
    return run_or_fail_together(
        group, _FAILED, lambda: made if leads else _open_file(pid, number, header, files)
    )


def _new_file(total: int, beside: int, files: ExitStack) -> int:
    free = free_memory_bytes()
    if total + beside > free:
        more = f" and each takes its own, together {beside / _GIB:.2f} GiB" if beside else ""
        raise _too_little(total, f"only {free / _GIB:.2f} GiB are free{more}")
    file = os.memfd_create(_NAME)
    files.callback(os.close, file)
    with _told(total):
        os.ftruncate(file, total)
    return file


def _open_file(pid: int, number: int, header: bytes, files: ExitStack) -> int:
    """That of another rank."""
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        # known before it is opened, which some files notice
        ours = str(path.readlink()).startswith(f"/memfd:{_NAME} ")
        file = os.open(path, os.O_RDWR) if ours else -1
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}: the ranks of a node share memory by it: run them all as "
            "one user, in one container"
        ) from error
    if ours:
        files.callback(os.close, file)
    if not ours or os.pread(file, len(header), 0) != header:
        raise UserError(
            f"{path}: not the memory that this rank expects: start all ranks of a node with one "
            "version of shardlab and equal settings"
        )
    return file


def _map(file: int, total: int, parts: Iterable[range]) -> mmap.mmap:
    """Takes the parts, and shows the whole: a page that cannot be had is missed now, not when used.

    A page belongs to that part of the machine whose processor asks for it first.
    """
    with _told(total):
        for part in filter(None, parts):
            os.posix_fallocate(file, part.start, len(part))
        return mmap.mmap(file, total)


@contextmanager
def _told(total: int) -> Iterator[None]:
    """Tells a lack of memory to the user."""
    try:
        yield
    except OSError as error:
        raise _too_little(total, (error.strerror or str(error)).lower()) from error


def _too_little(total: int, why: str) -> UserError:
    return UserError(
        f"slide: the ranks of a node share {total / _GIB:.2f} GiB of host memory, and {why}: "
        "take a smaller model, states of fewer bits or more nodes"
    )
