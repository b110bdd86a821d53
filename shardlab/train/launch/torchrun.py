"""A command that is one of torchrun's ranks: torchrun ends and restarts the commands."""

import json
import os
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from shardlab.core.progress import say
from shardlab.train.launch.failure import Failure, first
from shardlab.train.launch.peers import Peers, Verdict
from shardlab.train.launch.place import Place

_OTHERS_TELL_S = 0.5
_OTHERS_SHOW_S = 3.0


class Torchrun(Peers):
    """The ranks meet in the store of torchrun, or that of rank 0 where it has none."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def begin(self) -> None:
        """Nothing is to be done: torchrun starts all commands together."""

    def serve(self) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        """Nothing is to be done."""

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return store

    def settle(self, failure: Failure | None) -> Verdict:
        """Torchrun shows what every command writes: only the first failure is told in full.

        Raises:
            SystemExit: another command tells it.
        """
        if failure is None:
            return Verdict(None)
        others = self._tell(failure)
        foremost = first([failure, *others])
        if foremost is not failure:
            assert foremost is not None
            say(f"rank {self._place.command} ends, too: {foremost.summary}")
            # torchrun ends all commands with the first that leaves, also the one that has to tell
            time.sleep(_OTHERS_SHOW_S)
            raise SystemExit(1)
        return Verdict(failure)

    def _tell(self, failure: Failure) -> list[Failure]:
        """Leaves the failure in the store, and returns those of the others."""
        try:
            store = dist.PrefixStore(
                f"{failure.meeting}/failures",
                dist.TCPStore(
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    is_master=False,
                    timeout=timedelta(seconds=_OTHERS_TELL_S),
                ),
            )
            store.set(str(self._place.command), json.dumps(asdict(failure)))
            time.sleep(_OTHERS_TELL_S)
            told = (str(rank) for rank in range(self._place.commands))
            return [Failure(**json.loads(store.get(rank))) for rank in told if store.check([rank])]
        except RuntimeError:  # the store has ended with rank 0 or its machine
            return []
