"""Prefetching of parameters from host memory to the device."""

from torch import Tensor

from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Account, Ledger
from shardlab.core.errors import UserError
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.sync import (
    BACKWARD_END,
    GATHER,
    SEQUENCE,
    UPDATED,
    ErrorRelay,
    RankProgress,
)
from shardlab.engines.slide.unit import SlideUnit, chunk_of
from shardlab.transport.background import Running


class Prefetcher:
    """Copies of units to the device, each as soon as its last update is done.

    Args:
        gather: ranks load their own chunks and all-gather the rest on the device; None: every rank
            loads whole units.
        ledger: counts what ranks load of each other's chunks.
        rank, world_size: in the node.
    """

    def __init__(
        self,
        copies: Copies,
        progress: RankProgress,
        errors: ErrorRelay,
        gather: Collective | None,
        ledger: Ledger,
        rank: int,
        world_size: int,
    ) -> None:
        self._copies, self._progress, self._gather = copies, progress, gather
        self._errors, self._ledger = errors, ledger
        self._rank, self._world_size = rank, world_size
        self._order = _GatherOrder(progress)

    def start(self, unit: SlideUnit, vector: Tensor, step: int | None) -> Running:
        """Fill a vector on the device, as long as the unit or as its trained part.

        Args:
            step: that uses it, and may not have begun; None if no step does.
        """
        fetch = self._errors.guard(self._fetch)
        return self._copies.start_in(fetch, unit, vector, unit.updates, step)

    def backward_ended(self) -> None:
        """Announce the end of a backward pass; all ranks do so before any gathers again."""
        if self._gather is not None:
            self._copies.start_in(self._errors.guard(self._end))

    def count_step(self, step: int) -> None:
        """Count in the ledger what was fetched for a step, all of which has arrived."""
        self._ledger.join(step)

    def _fetch(self, unit: SlideUnit, vector: Tensor, updates: int, step: int | None) -> None:
        with self._ledger.apart(step):
            fetch = self._load if self._gather is None else self._load_and_gather
            fetch(unit, vector, updates)

    def _load(self, unit: SlideUnit, vector: Tensor, updates: int) -> None:
        # other ranks update their chunks of what this one copies
        self._progress.wait(UPDATED, unit.index, updates)
        self._copies.copy(vector, unit.source[: vector.numel()])
        if self._world_size > 1 and unit.count:  # no rank in particular owns frozen parameters
            trained = vector[: unit.size]
            count_shared_memory(self._ledger.accounts["weights"], trained, self._world_size)

    def _load_and_gather(self, unit: SlideUnit, vector: Tensor, updates: int) -> None:
        assert self._gather is not None
        self._order.announce(GATHER, unit.index)
        both = vector.numel() > unit.size
        # chunks of the whole vector are cut elsewhere than the trained chunks that ranks update, so
        # a unit with a frozen part waits for all ranks
        self._progress.wait(UPDATED, unit.index, updates, None if both else [self._rank])
        shard = chunk_of(vector, self._rank, self._world_size)
        source = unit.source[: vector.numel()]
        self._copies.copy(shard, chunk_of(source, self._rank, self._world_size))
        # a gather that another rank does not join would hang until the timeout
        self._order.agree(GATHER, unit.index)
        self._gather.all_gather(vector, shard, unit.message_of_both if both else unit.message)

    def _end(self) -> None:
        self._order.announce(BACKWARD_END)
        self._order.agree(BACKWARD_END)


class _GatherOrder:
    """Agreement of a node's ranks on one sequence of gathers and ends of backward passes.

    A gather that another rank does not join would last until the timeout, and one that meets the
    gather of another unit would mix up parameters: all ranks agree on each event before it. Ranks
    publish its number, so one that asks late still finds out what it was.

    One lane calls.
    """

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress
        self._number = self._agreed = 0

    def announce(self, event: str, unit: int = 0) -> None:
        """Publish this rank's next event.

        Raises:
            RuntimeError: the event before has failed, so that this one is not the next.
        """
        if self._agreed < self._number:
            raise RuntimeError(f"gather {self._number} has failed")
        self._number += 1
        self._progress.publish(event, unit, self._number)
        # second: a rank that sees this number sees the event, too
        self._progress.publish(SEQUENCE, 0, self._number)

    def agree(self, event: str, unit: int = 0) -> None:
        """Return when all ranks have announced the same event.

        Raises:
            UserError: a rank has announced another one.
        """
        self._progress.wait(SEQUENCE, 0, self._number)
        others = self._progress.behind(event, unit, self._number)
        if others:
            raise UserError(
                f"slide: {others} uses other layers than this rank, or in another order, and with "
                "param_transfer: shard each gathers them from all: set param_transfer: full"
            )
        self._agreed = self._number


def count_shared_memory(account: Account, vector: Tensor, world_size: int) -> None:
    """Count a vector that ranks read from each other's memory as if it were sent."""
    moved = vector.nbytes * (world_size - 1) / world_size
    account.collectives += 1
    account.bytes_raw += moved
    account.bytes_wire += moved
