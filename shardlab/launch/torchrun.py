"""A command that is one of torchrun's ranks: torchrun ends and restarts the commands."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from shardlab.core.progress import say
from shardlab.launch.failure import Failure, first
from shardlab.launch.peers import Peers, Verdict
from shardlab.launch.place import Place

_CONNECT_S = 10.0
_LOOK_S = 0.05
_LAST_WORDS_S = 0.5
"""a rank that is killed takes others along within milliseconds"""
_WORDS_BEFORE_S = 10.0
"""longest time until a failure that came before is told"""
_OTHERS_SHOW_S = 3.0


class Torchrun(Peers):
    """The ranks meet in the store of torchrun, or that of rank 0 where it has none."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: dist.Store | None = None

    def begin(self) -> None:
        """Nothing is to be done: torchrun starts all commands together."""

    def serve(self) -> None:
        """Connects at once: a slow name server would delay the last words."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with suppress(RuntimeError):  # without it, every command tells its own failure
            timeout = timedelta(seconds=_CONNECT_S)
            self._store = dist.TCPStore(*address, is_master=False, timeout=timeout)

    def close(self) -> None:  # noqa: D102
        self._store = None

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return store

    def settle(self, failure: Failure | None) -> Verdict:
        """Torchrun shows what every command writes: only the first failure is told in full.

        Raises:
            SystemExit: another command tells it.
        """
        before = None if failure is None else self._failure_before(failure)
        if before is None:
            return Verdict(failure)
        say(f"rank {self._place.command} ends, too: {before.summary}")
        # torchrun ends all commands with the first that leaves, also the one that has to tell
        time.sleep(_OTHERS_SHOW_S)
        raise SystemExit(1)

    def _failure_before(self, failure: Failure) -> Failure | None:
        """Tells the others, and learns from them."""
        if self._store is None or not failure.meeting:
            return None
        said = dist.PrefixStore(f"{failure.meeting}/failures", self._store)
        numbers = [str(rank) for rank in range(self._place.commands)]
        # who is not the first to fail knows that somebody else has to tell
        patience = _LAST_WORDS_S if failure.order <= 1 else _WORDS_BEFORE_S
        deadline = time.monotonic() + patience
        with suppress(RuntimeError):  # the store has ended with rank 0 or its machine
            said.set(str(self._place.command), json.dumps(asdict(failure)))
            while time.monotonic() < deadline:
                told = [json.loads(said.get(rank)) for rank in numbers if said.check([rank])]
                foremost = first(Failure(**values) for values in told)
                if foremost is not None and foremost.order < failure.order:
                    return foremost
                time.sleep(_LOOK_S)
        return None
