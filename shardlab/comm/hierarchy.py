"""Two levels: one codec inside a node, another one between nodes.

The reduce-scatter of ZeRO++ (Wang et al. 2023, section 3.3) and SDP4Bit (Jia et al. 2024): between
nodes travels only what a node has added up, 1/L of the vector for each of its L ranks. Every value
is quantized twice.
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
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Kind, Ledger, extra_collective
from shardlab.core.errors import UserError
from shardlab.transport.object_collectives import device_of

ACROSS = "@nodes"
"""ends the names under which the second level keeps residuals and steps"""


class HierarchicalCollective(Collective):
    """An exchange inside nodes of L ranks and one between the N nodes; rank = L * node + place.

    The ledger counts the messages of both levels; `bytes_between_nodes` those of the second alone.

    Args:
        inside, between: the codecs of the two levels.
        ranks_per_node: L; the ranks of a node follow one another.
        feedback: residuals of both levels, or None.

    Raises:
        UserError: the ranks do not make up whole nodes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        inside: Codec,
        between: Codec,
        ranks_per_node: int,
        feedback: ErrorFeedback | None = None,
        minimum_size: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(group, ledger, kind)
        if self.world_size % ranks_per_node:
            raise UserError(
                f"ranks_per_node: {self.world_size} ranks are not whole nodes of {ranks_per_node}: "
                "choose a divisor"
            )
        self.ranks_per_node = ranks_per_node
        self.nodes = self.world_size // ranks_per_node
        node, place = divmod(self.rank, ranks_per_node)
        members = dist.get_process_group_ranks(group)
        # every rank makes its node's group first, then the one across nodes
        groups = [
            subgroup(group, chosen)
            for chosen in (
                members[node * ranks_per_node : (node + 1) * ranks_per_node],
                members[place::ranks_per_node],
            )
        ]
        self.inside, self.between = (
            AllToAllCollective(level, ledger, kind, codec, feedback, minimum_size, seed)
            for level, codec in zip(groups, (inside, between), strict=True)
        )
        self._buffers = Buffers()

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Place p of a node adds up, inside, the chunks of place p of every node; then across."""
        n = output.numel()
        by_node = vector.view(self.nodes, self.ranks_per_node, n)
        given = self._room("given", vector).view(self.ranks_per_node, self.nodes, n)
        given.copy_(by_node.transpose(0, 1))
        of_node = self._room("of the node", vector, self.nodes * n)
        audit, self.ledger.audit = self.ledger.audit, None
        try:
            self.inside.reduce_scatter(of_node, given.view(-1), 1.0, _inside(unit))
            with self._between():
                self.between.reduce_scatter(output, of_node, scale, _across(unit))
        finally:
            self.ledger.audit = audit
        self._audit(output, vector, scale)

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """A reduce-scatter and an all-gather."""
        n, size = vector.numel(), self.world_size
        padded = vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))
        shard = padded.new_empty(padded.numel() // size)
        self.reduce_scatter(shard, padded, scale, unit)
        self.all_gather(padded, shard, unit)
        if padded is not vector:
            vector.copy_(padded[:n])

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Across nodes first, so that every shard goes to each other node once."""
        n = shard.numel()
        of_place = self._room("of the place", output, self.nodes * n)
        with self._between():
            self.between.all_gather(of_place, shard, _across(unit))
        taken = self._room("taken", output)
        self.inside.all_gather(taken, of_place, _inside(unit))
        by_node = output.view(self.nodes, self.ranks_per_node, n)
        by_node.copy_(taken.view(self.ranks_per_node, self.nodes, n).transpose(0, 1))

    def state_dict(self) -> dict[str, Tensor]:
        """The steps of both levels' units."""
        return {**self.inside.state_dict(), **self.between.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from saved steps."""
        across = {name: step for name, step in state.items() if name.endswith(ACROSS)}
        self.between.load_state_dict(across)
        self.inside.load_state_dict({n: step for n, step in state.items() if n not in across})

    def _room(self, purpose: str, like: Tensor, n: int | None = None) -> Tensor:
        size = (like.numel() if n is None else n) * like.element_size()
        return self._buffers.bytes(purpose, size, like.device).view(like.dtype)

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Around the collective of the second level, which is one more than needed."""
        before = self.account.bytes_wire
        with extra_collective(self.account):
            yield
        self.account.bytes_between_nodes += self.account.bytes_wire - before


def subgroup(
    group: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of some ranks of `group`, by default on its backend, with its timeout."""
    backend = backend or dist.get_backend(group)
    # the default is half an hour
    timeout = timeout_of(group)
    found: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend, use_local_synchronization=True
    )
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank of the group waits for others."""
    # torch 2.13 tells it in no public way
    timeout: timedelta = group._get_backend(device_of(group)).options._timeout
    return timeout


def _inside(unit: Unit) -> Unit:
    """Without blocks: chunks lie in another order here."""
    return Unit(unit.name)


def _across(unit: Unit) -> Unit:
    """Residuals and steps of the second level are kept apart from those of the first."""
    return Unit(unit.name + ACROSS)
