"""Two-level collectives: one codec inside a node, another one between nodes.

The reduce-scatter of ZeRO++ (Wang et al. 2023, section 3.3) and SDP4Bit (Jia et al. 2024): nodes
exchange only their sums, 1/L of the vector for each of their L ranks. Every value is quantized
twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import Buffers
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.codec_collective import DEFAULT, CodecSettings
from shardlab.comm.collective import Collective
from shardlab.comm.layout import ACROSS
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.object_collectives import device_of
from shardlab.core.errors import UserError


class HierarchicalCollective(Collective):
    """All-to-all inside nodes of L ranks, then between the N nodes; rank = L * node + local rank.

    The ledger counts the messages of both levels; `bytes_between_nodes` those of the second alone.

    Args:
        inside, between: the codecs of the two levels.
        ranks_per_node: L; the ranks of a node follow one another.

    Raises:
        UserError: the ranks are not whole nodes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        inside: Codec,
        between: Codec,
        ranks_per_node: int,
        settings: CodecSettings = DEFAULT,
    ) -> None:
        super().__init__(group, ledger, kind)
        if self.world_size % ranks_per_node:
            raise UserError(
                f"ranks_per_node: {self.world_size} ranks are not whole nodes of {ranks_per_node}: "
                "choose a divisor"
            )
        self.ranks_per_node = ranks_per_node
        self.nodes = self.world_size // ranks_per_node
        node, local_rank = divmod(self.rank, ranks_per_node)
        ranks = dist.get_process_group_ranks(group)
        of_node = ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
        # every rank creates its node's group first: groups are created in one order on all ranks
        groups = [subgroup(group, each) for each in (of_node, ranks[local_rank::ranks_per_node])]
        self.inside, self.between = (
            AllToAllCollective(level, ledger, kind, codec, settings)
            for level, codec in zip(groups, (inside, between), strict=True)
        )
        self._buffers = Buffers()

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Sum inside the node the chunks for its local rank in every node, then between nodes."""
        n = output.numel()
        by_node = vector.view(self.nodes, self.ranks_per_node, n)
        given = self._buffer("given", vector).view(self.ranks_per_node, self.nodes, n)
        given.copy_(by_node.transpose(0, 1))
        of_node = self._buffer("of the node", vector, self.nodes * n)
        # the audit compares both levels with the exact sum, not one level with its inputs
        audit, self.ledger.audit = self.ledger.audit, None
        try:
            self.inside.reduce_scatter(of_node, given.view(-1), 1.0, _inside(unit))
            with self._between(vector):
                self.between.reduce_scatter(output, of_node, scale, _across(unit))
        finally:
            self.ledger.audit = audit
        self._audit(output, vector, scale)

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather."""
        n, size = vector.numel(), self.world_size
        padded = vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))
        shard = padded.new_empty(padded.numel() // size)
        self.reduce_scatter(shard, padded, scale, unit)
        self.all_gather(padded, shard, unit)
        if padded is not vector:
            vector.copy_(padded[:n])

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Gather between nodes first, so that every shard is sent to each other node once."""
        n = shard.numel()
        gathered = self._buffer("of the local rank", output, self.nodes * n)
        with self._between(output):
            self.between.all_gather(gathered, shard, _across(unit))
        taken = self._buffer("taken", output)
        self.inside.all_gather(taken, gathered, _inside(unit))
        by_node = output.view(self.nodes, self.ranks_per_node, n)
        by_node.copy_(taken.view(self.ranks_per_node, self.nodes, n).transpose(0, 1))

    def state_dict(self) -> dict[str, Tensor]:  # noqa: D102
        return {**self.inside.state_dict(), **self.between.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        across = {name: step for name, step in state.items() if name.endswith(ACROSS)}
        self.between.load_state_dict(across)
        self.inside.load_state_dict({n: step for n, step in state.items() if n not in across})

    def _buffer(self, purpose: str, like: Tensor, n: int | None = None) -> Tensor:
        size = (like.numel() if n is None else n) * like.element_size()
        return self._buffers.bytes(purpose, size, like.device).view(like.dtype)

    @contextmanager
    def _between(self, like: Tensor) -> Iterator[None]:
        """Count the collective of the second level, which one level would not need."""
        before = self.account.bytes_wire
        with self.ledger.extra_collective(self.account, like.device):
            yield
        self.account.bytes_between_nodes += self.account.bytes_wire - before


def subgroup(
    group: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup:
    """Return a new group of some ranks of `group`, by default on its backend, with its timeout."""
    # torch's default timeout is half an hour
    found: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout_of(group),
        backend or dist.get_backend(group),
        use_local_synchronization=True,
    )
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a rank of the group waits for others."""
    # private attributes: torch 2.13 has no public way to read the timeout of a group
    timeout: timedelta = group._get_backend(device_of(group)).options._timeout
    return timeout


def _inside(unit: Unit) -> Unit:
    """Return the unit without blocks: chunks have another order inside a node."""
    return Unit(unit.name)


def _across(unit: Unit) -> Unit:
    """Return the unit of the second level, which has residuals and steps under this name."""
    return Unit(unit.name + ACROSS)
