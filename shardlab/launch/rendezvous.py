"""Rendezvous of the ranks of one attempt in a store that may still hold earlier attempts."""

import json
import time
import uuid
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from shardlab.launch.devices import backend_of

_POLL_S = 0.02
"""a blocking wait of the store with a short time-out would write warnings"""


class Rendezvous(NamedTuple):
    """Name, store and backend that all ranks of an attempt have agreed on."""

    name: str
    store: dist.Store
    """with the name as prefix: of the ranks of this attempt alone"""
    backend: str


def rendezvous(
    store: dist.Store, rank: int, world_size: int, gpu: str, timeout: timedelta
) -> Rendezvous:
    """Wait for all ranks of this attempt.

    The store of torchrun's agent outlives a restart, TORCHELASTIC_RESTART_COUNT may differ between
    nodes, and gloo would connect to the addresses of processes that are gone. So rank 0 publishes a
    new name for each attempt and lists the tokens of the ranks that joined it. A rank that finds
    the name of an earlier attempt is not in its list, and looks again.

    Args:
        gpu: UUID of the rank's own GPU, or empty.

    Raises:
        TimeoutError: names the ranks that did not join.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _open(store, world_size, gpu, deadline)
    name, token = "", uuid.uuid4().hex
    while True:
        if store.check(["attempt"]) and (latest := store.get("attempt").decode()) != name:
            name = latest
            own = dist.PrefixStore(name, store)
            own.set(str(rank), json.dumps([token, gpu]))
        if name and own.check(["begin"]):
            tokens, backend = json.loads(own.get("begin"))
            if tokens[rank - 1] == token:
                return Rendezvous(name, own, backend)
        _sleep(deadline, f"rank {rank} found no rendezvous of rank 0")


def _open(store: dist.Store, world_size: int, gpu: str, deadline: float) -> Rendezvous:
    name = uuid.uuid4().hex
    own = dist.PrefixStore(name, store)
    store.set("attempt", name)
    ranks = [str(rank) for rank in range(1, world_size)]
    while missing := [rank for rank in ranks if not own.check([rank])]:
        _sleep(deadline, f"rank {', '.join(missing)} did not join")
    joined = [json.loads(own.get(rank)) for rank in ranks]
    backend = backend_of([gpu, *(gpu for _, gpu in joined)])
    own.set("begin", json.dumps([[token for token, _ in joined], backend]))
    return Rendezvous(name, own, backend)


def _sleep(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{problem} within the time-out")
    time.sleep(_POLL_S)
