"""How the ranks of one attempt find each other in a store that may remember earlier attempts."""

import json
import time
import uuid
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from shardlab.launch.devices import backend_of

_LOOK_S = 0.02
"""between two looks at the store; a wait with a short time-out would write warnings instead"""


class Meeting(NamedTuple):
    """What all ranks of an attempt, and nobody else, know."""

    name: str
    store: dist.Store
    """their own part of the store"""
    backend: str


def meet(store: dist.Store, rank: int, world_size: int, gpu: str, timeout: timedelta) -> Meeting:
    """Returns when all ranks of this attempt are there.

    torchrun's ranks of a second attempt find the first one's entries in the store, and gloo would
    connect to the addresses of processes that are gone. So rank 0 opens a new meeting each time,
    and says who takes part; a rank that finds an old one is not among them, and looks again.

    Args:
        gpu: UUID of the rank's own GPU, or empty.

    Raises:
        TimeoutError: the ranks that did not come.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _open(store, world_size, gpu, deadline)
    name, ticket = "", uuid.uuid4().hex
    while True:
        if store.check(["meeting"]) and (latest := store.get("meeting").decode()) != name:
            name = latest
            room = dist.PrefixStore(name, store)
            room.set(str(rank), json.dumps([ticket, gpu]))
        if name and room.check(["begin"]):
            guests, backend = json.loads(room.get("begin"))
            if guests[rank - 1] == ticket:
                return Meeting(name, room, backend)
        _look_again(deadline, f"rank {rank} found no meeting with rank 0")


def _open(store: dist.Store, world_size: int, gpu: str, deadline: float) -> Meeting:
    name = uuid.uuid4().hex
    room = dist.PrefixStore(name, store)
    store.set("meeting", name)
    ranks = [str(rank) for rank in range(1, world_size)]
    while missing := [rank for rank in ranks if not room.check([rank])]:
        _look_again(deadline, f"rank {', '.join(missing)} did not come")
    others = [json.loads(room.get(rank)) for rank in ranks]
    backend = backend_of([gpu, *(gpu for _, gpu in others)])
    room.set("begin", json.dumps([[ticket for ticket, _ in others], backend]))
    return Meeting(name, room, backend)


def _look_again(deadline: float, told: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{told} within the time-out")
    time.sleep(_LOOK_S)
