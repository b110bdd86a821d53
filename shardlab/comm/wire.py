"""The wire of methods that take several rounds: sums and gathers of a process group, counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.ledger import Account, Kind, Ledger


class GroupWire:
    """`shardlab.codecs.multi_phase.Wire` over a process group, counted in a ledger as it moves."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.rounds = 0
        """collectives so far"""
        self.seconds = 0.0
        """wall time in them"""
        self.later_seconds = 0.0
        """of that: in those after the first of each message"""
        self._first = 0
        self._group = group
        self._ledger = ledger
        self._kind: Kind = kind
        self._reported = 0

    @property
    def reported(self) -> int:
        """Messages so far that their method sent uncompressed."""
        return self._reported

    def begin(self) -> None:
        """The next collective is the first of a message."""
        self._first = self.rounds

    def sum(self, vector: Tensor) -> None:
        """vector[m] = sum over ranks, in place: an all-reduce, 2 (W - 1) / W of its bytes."""
        with self._moving(2 * vector.nbytes * self._others()):
            dist.all_reduce(vector, group=self._group)

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """The sum over ranks of chunk `rank`: an all-to-all, (W - 1) / W of the bytes.

        Summed by the owner in rank order, since gloo's own reduce-scatter moves twice as much.
        """
        taken = torch.empty_like(vector)
        with self._moving(vector.nbytes * self._others()):
            dist.all_to_all_single(taken, vector, group=self._group)
        total, *others = taken.chunk(self.world_size)
        for other in others:
            total += other
        return total

    def gather(self, shard: Tensor) -> Tensor:
        """The shards of all ranks: an all-gather, W - 1 times the bytes of a shard."""
        taken = shard.new_empty(self.world_size * shard.numel())
        nbytes = shard.nbytes * (self.world_size - 1)
        with self._moving(nbytes):
            dist.all_gather_single(taken, shard, group=self._group)
        if not shard.is_floating_point():
            self._account.index_bytes += nbytes
        return taken

    def uncompressed(self, reason: str) -> None:
        """Counts a message that its method sends as it is."""
        self._account.uncompressed[reason] += 1
        self._reported += 1

    @property
    def _account(self) -> Account:
        return self._ledger.accounts[self._kind]

    def _others(self) -> float:
        return (self.world_size - 1) / self.world_size

    @contextmanager
    def _moving(self, nbytes: float) -> Iterator[None]:
        start = perf_counter()
        with self._ledger.traffic.operation(nbytes):
            yield
        seconds = perf_counter() - start
        self.seconds += seconds
        if self.rounds > self._first:
            self.later_seconds += seconds
        self.rounds += 1
        self._account.collectives += 1
        self._account.bytes_wire += nbytes
