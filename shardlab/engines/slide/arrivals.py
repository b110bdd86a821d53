"""How parameters come to the device."""

from torch import Tensor

from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Account, Ledger
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.turns import ENDED, GATHERS, GatherTurns
from shardlab.engines.slide.unit import SlidUnit, chunk_of
from shardlab.transport.background import Running

UPDATED = "updated"
"""published by each rank of a node for its chunk of a unit"""


class Arrivals:
    """Brings units to the device, as soon as their last update is done.

    Args:
        gather: ranks load their own chunks and gather the rest on the device; None: every rank
            loads whole units.
        ledger: counts what ranks load of each other's chunks.
    """

    def __init__(
        self,
        copies: Copies,
        control: Control,
        faults: Faults,
        gather: Collective | None,
        ledger: Ledger,
        rank: int,
        world_size: int,
    ) -> None:
        self._copies, self._control, self._gather = copies, control, gather
        self._faults, self._ledger = faults, ledger
        self._rank, self._world_size = rank, world_size
        self._turns = GatherTurns(control)

    def start(self, unit: SlidUnit, vector: Tensor, step: int | None) -> Running:
        """Fills a vector on the device: as long as the unit, or as its trained part alone.

        Args:
            step: that uses it, and may not have begun; None if no step does.
        """
        fetch = self._faults.watched(self._fetch)
        return self._copies.start_in(fetch, unit, vector, unit.updates, step)

    def ended(self) -> None:
        """This rank has ended a backward pass; all do before any gathers again."""
        if self._gather is not None:
            self._copies.start_in(self._faults.watched(self._end))

    def counted(self, step: int) -> None:
        """What came for a step counts in the ledger from now on; all of that has arrived."""
        self._ledger.join(step)

    def _fetch(self, unit: SlidUnit, vector: Tensor, updates: int, step: int | None) -> None:
        with self._ledger.apart(step):
            fetch = self._load if self._gather is None else self._load_and_gather
            fetch(unit, vector, updates)

    def _load(self, unit: SlidUnit, vector: Tensor, updates: int) -> None:
        self._control.wait(UPDATED, unit.index, updates)
        self._copies.copy(vector, unit.source[: vector.numel()])
        if self._world_size > 1 and unit.count:  # what is frozen is nobody's in particular
            trained = vector[: unit.size]
            share_in_memory(self._ledger.accounts["weights"], trained, self._world_size)

    def _load_and_gather(self, unit: SlidUnit, vector: Tensor, updates: int) -> None:
        assert self._gather is not None
        self._turns.begin(GATHERS, unit.index)
        both, ours = vector.numel() > unit.size, (self._rank, self._world_size)
        # with a frozen part behind them, chunks are not cut as those that ranks update
        self._control.wait(UPDATED, unit.index, updates, None if both else [self._rank])
        shard = chunk_of(vector, *ours)
        self._copies.copy(shard, chunk_of(unit.source[: vector.numel()], *ours))
        self._turns.agree(GATHERS, unit.index)
        self._gather.all_gather(vector, shard, unit.message_of_both if both else unit.message)

    def _end(self) -> None:
        self._turns.begin(ENDED)
        self._turns.agree(ENDED)


def share_in_memory(account: Account, vector: Tensor, world_size: int) -> None:
    """Counts what goes from rank to rank through their memory as if it were sent."""
    moved = vector.nbytes * (world_size - 1) / world_size
    account.collectives += 1
    account.bytes_raw += moved
    account.bytes_wire += moved
