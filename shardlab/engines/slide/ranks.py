"""The ranks that train together, as the slide engine sees them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.hierarchy import subgroup
from shardlab.core.errors import UserError
from shardlab.core.strategy import Strategy
from shardlab.engines.mesh import make_mesh
from shardlab.engines.slide.groups import node_groups


@dataclass(frozen=True)
class Ranks:
    """The ranks that share main memory with this one, and what they communicate over."""

    here: dist.ProcessGroup
    """the ranks of the node"""
    across: dist.ProcessGroup | None
    """those that update the same chunk on other nodes, where there are any"""
    gathers: dist.ProcessGroup | None
    """of the node, for parameters on the device; None: every rank loads whole units"""
    reductions: dist.ProcessGroup | None
    """of the node, for gradients on the device or in main memory; None: sums of slots"""
    mesh: DeviceMesh
    """[ranks] or [nodes, ranks], of main memory"""

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


def ranks_of(
    strategy: Strategy, group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> Ranks:
    """Called by all ranks of the group together.

    Args:
        strategy: in its normal form.
        ranks_per_node: see `node_groups`.

    Raises:
        UserError: see `node_groups`; or the ranks of a node do not follow each other.
    """
    here, across = node_groups(group, ranks_per_node)
    alone = dist.get_world_size(here) == 1
    gathers = None if strategy.param_transfer == "full" or alone else _like(group, here)
    return Ranks(
        here,
        across,
        gathers,
        None if alone else _reductions(strategy, group, here),
        _mesh(group, here, 1 if across is None else dist.get_world_size(across)),
    )


def _like(
    group: dist.ProcessGroup, here: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """Of the ranks of the node, for what runs beside other collectives."""
    return subgroup(group, dist.get_process_group_ranks(here), backend)


def _reductions(
    strategy: Strategy, group: dist.ProcessGroup, here: dist.ProcessGroup
) -> dist.ProcessGroup | None:
    if strategy.grad_sync == "gpu_reduce":
        return _like(group, here)
    if strategy.gradients.route == "native" and strategy.gradients.plain():
        return None
    return _like(group, here, "gloo")


def _mesh(group: dist.ProcessGroup, here: dist.ProcessGroup, nodes: int) -> DeviceMesh:
    ranks, size = dist.get_process_group_ranks(group), dist.get_world_size(here)
    node = dist.get_rank(group) // size
    if dist.get_process_group_ranks(here) != ranks[node * size : (node + 1) * size]:
        raise UserError("slide: ranks of one node must follow each other: number them by node")
    return make_mesh(group, nodes, torch.device("cpu"))
