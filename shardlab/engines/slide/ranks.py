"""The ranks that train together, as the slide engine sees them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.hierarchy import subgroup
from shardlab.core.errors import UserError
from shardlab.engines.common.mesh import REPLICATE, SHARD
from shardlab.engines.slide.groups import node_groups
from shardlab.engines.slide.lending import Lent, lend
from shardlab.strategy.strategy import Strategy


@dataclass(frozen=True)
class Ranks:
    """The ranks that share host memory with this one, and what they communicate over."""

    here: dist.ProcessGroup
    """the ranks of the node"""
    across: dist.ProcessGroup | None
    """those that update the same chunk on other nodes, where there are any"""
    gathers: dist.ProcessGroup | None
    """of the node, for parameters on the device; None: every rank loads whole units"""
    reductions: dist.ProcessGroup | None
    """of the node, for gradients on the device or in host memory; None: sums of slots"""
    mesh: DeviceMesh
    """[ranks] or [nodes, ranks], of host memory"""

    @property
    def rank(self) -> int:
        """This one, among those of its node."""
        return dist.get_rank(self.here)

    @property
    def world_size(self) -> int:
        """Of the node."""
        return dist.get_world_size(self.here)

    @property
    def nodes(self) -> int:
        """How many there are."""
        return 1 if self.across is None else dist.get_world_size(self.across)

    @property
    def sums(self) -> bool:
        """Whether an update adds up the slots of all ranks of the node."""
        return self.world_size > 1 and self.reductions is None


class Needs(NamedTuple):
    """What the process groups of a strategy depend on."""

    gathers: bool
    reductions: Literal["device", "memory"] | None
    ranks_per_node: int | None

    @classmethod
    def of(cls, strategy: Strategy, ranks_per_node: int | None) -> "Needs":
        """Those of a strategy in its canonical form."""
        summed = strategy.gradients.route == "native" and strategy.gradients.plain()
        reductions: Literal["device", "memory"] | None = None if summed else "memory"
        if strategy.grad_sync == "gpu_reduce":
            reductions = "device"
        return cls(strategy.param_transfer == "shard", reductions, ranks_per_node)


def ranks_for(
    strategy: Strategy, group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> Lent[Ranks]:
    """Called by all ranks of the group together.

    Args:
        strategy: in its canonical form.
        ranks_per_node: see `node_groups`.

    Raises:
        UserError: see `node_groups`; or the ranks of a node do not follow each other.
    """
    needs = Needs.of(strategy, ranks_per_node)
    return lend(group, needs, lambda: _ranks(group, needs))


def _ranks(group: dist.ProcessGroup, needs: Needs) -> Ranks:
    here, across = node_groups(group, needs.ranks_per_node)
    mesh = _mesh(group, here, across)
    gathers = reductions = None
    if dist.get_world_size(here) > 1:
        members = dist.get_process_group_ranks(here)
        if needs.gathers:
            gathers = subgroup(group, members)
        if needs.reductions is not None:
            backend = "gloo" if needs.reductions == "memory" else None
            reductions = subgroup(group, members, backend)
    return Ranks(here, across, gathers, reductions, mesh)


def _mesh(
    group: dist.ProcessGroup, here: dist.ProcessGroup, across: dist.ProcessGroup | None
) -> DeviceMesh:
    ranks, size = dist.get_process_group_ranks(group), dist.get_world_size(here)
    node = dist.get_rank(group) // size
    if dist.get_process_group_ranks(here) != ranks[node * size : (node + 1) * size]:
        raise UserError("slide: ranks of one node must follow each other: number them by node")
    if across is None:
        return DeviceMesh.from_group(here, "cpu", mesh_dim_names=(SHARD,))
    nodes = torch.tensor(ranks).view(-1, size)
    names = REPLICATE, SHARD
    return DeviceMesh.from_group([across, here], "cpu", mesh=nodes, mesh_dim_names=names)
