"""Collectives of plain values, groups of fewer ranks, and ranks that are lost."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardlab.core import torch_private
from shardlab.core.errors import UserError, lost_rank

Value = TypeVar("Value")
_GroupKey = tuple[tuple[int, ...], str, timedelta]
"""ranks, backend and timeout"""


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the current GPU if the group has the NCCL backend, else the CPU."""
    # `get_backend` says "undefined" of a group that torch has chosen the backends of
    backends = dist.get_backend_config(group)
    return torch.device("cuda" if "nccl" in backends else "cpu")


_free: WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, list[dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)
"""groups that were released, in this order, by the default group of their time"""


def subgroup(
    group: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup:
    """Return a group of some ranks of `group` that nobody else uses, by default on its backend,
    with its timeout: one that was released, or a new one."""
    # torch's default timeout is half an hour
    key = tuple(ranks), backend or dist.get_backend(group), timeout_of(group)
    if released := _released().get(key):
        return released.pop(0)
    new: dist.ProcessGroup = dist.new_group(
        list(ranks), key[2], key[1], use_local_synchronization=True
    )
    return new


def release(groups: Iterable[dist.ProcessGroup]) -> None:
    """Leave groups of `subgroup` to its later callers, on all their ranks in the same order.

    A sweep in one process attaches often, and would run out of open files and threads. They are not
    destroyed: torch would give a later group of these ranks the same name, under which
    its ranks would find the addresses of the old one.
    """
    if not dist.is_initialized():
        return
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        key = ranks, dist.get_backend(group), timeout_of(group)
        _released().setdefault(key, []).append(group)


def _released() -> dict[_GroupKey, list[dist.ProcessGroup]]:
    world = dist.group.WORLD
    assert world is not None, "there are groups"
    return _free.setdefault(world, {})


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a rank of the group waits for others."""
    return torch_private.backend_timeout(group, device_of(group))


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_or_fail_together(group: dist.ProcessGroup, failed: str, call: Callable[[], Value]) -> Value:
    """Run `call` on all ranks; return its result once it has succeeded on all of them.

    Without it a rank that fails leaves the others waiting in their next collective.

    Args:
        failed: beginning of the message of errors other than `UserError`.

    Raises:
        UserError: on all ranks if the call failed on any rank: in one line, the first rank's error.
    """
    values, cause, message = [], None, None
    try:
        values.append(call())
    except UserError as error:
        message = str(error)
    except Exception as error:
        cause, text = error, " ".join(str(error).split())
        message = f"{failed} (rank {dist.get_rank(group)}: {text or type(error).__name__})"
    for reported in gather_values(message, group):
        if reported is not None:
            values.clear()  # the traceback refers to this frame and would keep the result alive
            raise UserError(reported) from cause
    return values[0]


@contextmanager
def naming_lost_rank(step: int) -> Iterator[None]:
    """Say in one line which rank is lost, where the error is about one, and what to do."""
    try:
        yield
    except RuntimeError as error:
        reason, rank = lost_rank(str(error)), re.search(r"rank \d+", str(error))
        if reason is None:
            raise
        raise RuntimeError(
            f"sync: {rank[0] if rank else 'a rank'} is lost at the synchronisation after step "
            f"{step} ({reason}): let all ranks take equally many steps (drop_last=True) and then "
            "call handle.synchronize(), and go on from the last checkpoint"
        ) from error
