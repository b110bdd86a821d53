"""The contract of a collective, and its trivial implementation: the process group's own."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.unit import Unit
from shardlab.comm.ledger import Account, Kind, Ledger


class Collective(ABC):
    """reduce-scatter, all-reduce and all-gather of float32 vectors over one process group.

    Laws:
    - every rank ends with the same bytes wherever the mathematics says "the same vector";
    - what moves is in the ledger, under `kind`, in bytes that this rank sends to others;
    - a message is named by its `unit`, which is the same on all ranks and in all steps.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.group = group
        self.ledger = ledger
        self.kind = kind
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @property
    def account(self) -> Account:
        """Where the messages of this collective are counted."""
        return self.ledger.accounts[self.kind]

    @abstractmethod
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """output[n] = scale * sum over ranks of chunk `rank` of vector[world_size * n]."""

    @abstractmethod
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """vector[n] = scale * sum over ranks of vector, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """output[world_size * n] = the shards[n] of all ranks, one after the other."""

    def state_dict(self) -> dict[str, Tensor]:
        """What the next messages depend on, beside their vectors: counters and the like."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continues from `state_dict()`."""

    def _count(self, raw: float, wire: float, extra: int = 0, collectives: int = 1) -> None:
        account = self.account
        account.collectives += collectives
        account.extra_collectives += extra
        account.bytes_raw += raw
        account.bytes_wire += wire

    def _share_of_others(self, nbytes: int) -> float:
        """(W-1)/W of a full vector: what a reduce-scatter or all-gather has to send per rank."""
        return nbytes * (self.world_size - 1) / self.world_size


class Native(Collective):
    """The process group's own collectives, uncompressed.

    On gloo a reduce-scatter is an all-reduce of the full vector of which each rank keeps its part,
    so twice the necessary bytes move; the ledger counts them.
    """

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        needed = self._share_of_others(vector.nbytes)
        doubled = dist.get_backend(self.group) == "gloo"
        self._count(raw=needed, wire=2 * needed if doubled else needed)
        dist.reduce_scatter_single(output, vector, op=dist.ReduceOp.SUM, group=self.group)
        if scale != 1:
            output.mul_(scale)

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if scale != 1:
            vector.mul_(scale)
        self.start_all_reduce(vector).wait()

    def start_all_reduce(self, vector: Tensor) -> dist.Work:
        """Starts the sum over ranks, in place, and returns at once."""
        needed = 2 * self._share_of_others(vector.nbytes)
        self._count(raw=needed, wire=needed)
        return dist.all_reduce(vector, group=self.group, async_op=True)

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        self.start_all_gather(output, shard).wait()

    def start_all_gather(self, output: Tensor, shard: Tensor) -> dist.Work:
        """Starts the gathering and returns at once."""
        needed = self._share_of_others(output.nbytes)
        self._count(raw=needed, wire=needed)
        return dist.all_gather_single(output, shard, group=self.group, async_op=True)
