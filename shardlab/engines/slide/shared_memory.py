"""Host memory that the ranks of one node share through an unnamed file (memfd)."""

import hashlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.core.host import free_memory_bytes
from shardlab.engines.slide.rank_progress import RankProgress, progress_bytes

_PAGE = mmap.PAGESIZE
_GIB = 1 << 30
_NAME = "shardlab"
_VERSION = 1
"""of the layout of `RankProgress` and `_layout`"""
_PROGRESS = ""
"""the region of `RankProgress`"""
_FAILED = "slide: the ranks of a node cannot share host memory"


class Regions:
    """Tensors in a memory mapping, by the names of its regions.

    Args:
        places: of each region, its bytes in the mapping.
    """

    def __init__(self, mapped: mmap.mmap, places: Mapping[str, range]) -> None:
        self._mapped, self._places = mapped, places

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the beginning of a region as a tensor: a view, which keeps the mapping."""
        place, count = self._places[name], torch.Size(shape).numel()
        assert count * dtype.itemsize <= len(place), f"{name}: {len(place)} bytes"
        if not count:  # frombuffer refuses to make an empty tensor
            return torch.empty(*shape, dtype=dtype)
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=place.start)
        return flat.view(*shape)


def lay_out(
    sizes: Mapping[str, int], padded: Callable[[int], int], start: int = 0
) -> dict[str, range]:
    """Return the places of regions of so many bytes, one after another.

    Args:
        padded: the bytes that a region takes, with what stays empty behind it.
        start: of the first region.
    """
    starts = accumulate(map(padded, sizes.values()), initial=start)
    return {
        name: range(start, start + size)
        for (name, size), start in zip(sizes.items(), starts, strict=False)
    }


class NodeMemory(Regions):
    """Regions of host memory that all ranks of a node see, and their `progress`.

    The file has no name: the kernel frees it with the last process, however that ends, and with the
    last tensor after `close`.

    Each rank allocates one of W equal parts of each region, rank after rank, on the NUMA node of
    its CPUs: give every vector that ranks update in shares a region of its own, and bind ranks to
    CPUs before.
    """

    progress: RankProgress

    def __init__(
        self, mapped: mmap.mmap, places: Mapping[str, range], progress: RankProgress
    ) -> None:
        super().__init__(mapped, places)
        self.progress = progress

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup,
        layout: Mapping[str, int],
        units: int,
        timeout_s: float,
        unshared_bytes: int = 0,
    ) -> Self:
        """Create zeroed memory; all ranks of the group call together, with equal arguments.

        Args:
            group: of gloo, the ranks of one node (`node_groups`).
            layout: bytes of each region, by its name.
            units: see `RankProgress`.
            unshared_bytes: that the ranks will allocate for themselves, which have to fit, too.

        Raises:
            UserError: (on all ranks) there is too little memory, or the ranks cannot share it.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        places = _layout(world_size, layout, units)
        total = _whole_pages(max(place.stop for place in places.values()))
        purpose = repr((world_size, places, units))
        with ExitStack() as files:  # the mapping keeps the memory without its descriptors
            file = _share(group, total, unshared_bytes, purpose, files)
            parts = [_part(place, rank, world_size) for place in places.values()]
            mapped = run_or_fail_together(group, _FAILED, lambda: _map(file, total, parts))
        first, pids = places.pop(_PROGRESS).start, gather_values(os.getpid(), group)
        names = dist.get_process_group_ranks(group)
        # together: all processes are alive while others open descriptors of them
        progress = run_or_fail_together(
            group,
            _FAILED,
            lambda: RankProgress(mapped, first, rank, pids, names, units, timeout_s),
        )
        return cls(mapped, places, progress)

    def close(self) -> None:
        """Leave the other ranks in order; tensors stay valid."""
        self.progress.close()
        del self._mapped


def _layout(world_size: int, layout: Mapping[str, int], units: int) -> dict[str, range]:
    """Return the places of regions, at whole pages; the header and `RankProgress` are first."""
    sizes = {_PROGRESS: progress_bytes(world_size, units), **layout}
    return lay_out(sizes, _whole_pages, _PAGE)


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _part(place: range, rank: int, world_size: int) -> range:
    """Return the pages of a region that a rank allocates."""
    count = _whole_pages(len(place)) // _PAGE
    first, last = (place.start + count * r // world_size * _PAGE for r in (rank, rank + 1))
    return range(first, last)


def _share(
    group: dist.ProcessGroup, total: int, unshared_bytes: int, purpose: str, files: ExitStack
) -> int:
    """Return a descriptor of one new file on all ranks, which `files` closes."""
    leads = dist.get_rank(group) == 0
    created = run_or_fail_together(
        group, _FAILED, lambda: _new_file(total, unshared_bytes, files) if leads else -1
    )
    session = secrets.token_hex(16)
    pid, number, session = gather_values([os.getpid(), created, session], group)[0]
    # the header names this run and layout: a rank that opens another file finds out
    header = hashlib.blake2b(f"{session} {_VERSION} {purpose}".encode()).digest()
    run_or_fail_together(group, _FAILED, lambda: os.pwrite(created, header, 0) if leads else None)
    return run_or_fail_together(
        group, _FAILED, lambda: created if leads else _open_file(pid, number, header, files)
    )


def _new_file(total: int, unshared_bytes: int, files: ExitStack) -> int:
    free = free_memory_bytes()
    if total + unshared_bytes > free:
        own = f" and each takes its own, together {unshared_bytes / _GIB:.2f} GiB"
        raise _too_little(total, f"only {free / _GIB:.2f} GiB are free{own * bool(unshared_bytes)}")
    file = os.memfd_create(_NAME)
    files.callback(os.close, file)
    with _explaining(total):
        os.ftruncate(file, total)
    return file


def _open_file(pid: int, number: int, header: bytes, files: ExitStack) -> int:
    """Open the file of another rank."""
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        # checked before it is opened, which some files (devices, pipes) react to
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
    """Allocate the parts and map the whole.

    Pages are allocated now, as one that is missing at its first use would kill the process. A page
    lies on the NUMA node of the CPU that allocates it.
    """
    with _explaining(total):
        for part in filter(None, parts):
            os.posix_fallocate(file, part.start, len(part))
        return mmap.mmap(file, total)


@contextmanager
def _explaining(total: int) -> Iterator[None]:
    """Turn a lack of memory into an error for the user."""
    try:
        yield
    except OSError as error:
        raise _too_little(total, (error.strerror or str(error)).lower()) from error


def _too_little(total: int, why: str) -> UserError:
    return UserError(
        f"slide: the ranks of a node share {total / _GIB:.2f} GiB of host memory, and {why}: "
        "take a smaller model, states of fewer bits or more nodes"
    )
