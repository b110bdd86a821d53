"""Process groups of the `slide` engine: the ranks of a node, and those of other nodes."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.object_collectives import gather_values, subgroup, timeout_of
from shardlab.core.errors import UserError
from shardlab.core.host import machine_key
from shardlab.engines.flat import REPLICATE, SHARD
from shardlab.strategy.document import CanonicalStrategy


@dataclass(frozen=True)
class RankGroups:
    """The process groups of a `slide` engine; each thread communicates over groups of its own."""

    here: dist.ProcessGroup
    """the ranks of the node, for the training thread"""
    across: dist.ProcessGroup | None
    """those that update the same chunk on other nodes, where there are any"""
    updates: dist.ProcessGroup
    """of the node, for the thread of updates"""
    gathers: dist.ProcessGroup | None
    """of the node, for parameters on the device; None: every rank loads whole units"""
    order: dist.ProcessGroup | None
    """of gloo, with `gathers`: ranks agree on the unit that they gather next"""
    reductions: dist.ProcessGroup | None
    """of the node, for messages with gradients; None: ranks sum vectors in shared memory"""
    mesh: DeviceMesh
    """[ranks] or [nodes, ranks], of host memory"""

    @property
    def rank(self) -> int:
        """This rank, among those of its node."""
        return dist.get_rank(self.here)

    @property
    def world_size(self) -> int:
        """Number of ranks of the node."""
        return dist.get_world_size(self.here)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return 1 if self.across is None else dist.get_world_size(self.across)

    @property
    def sums(self) -> bool:
        """Return whether an update adds up the gradients of all ranks of the node."""
        return self.world_size > 1 and self.reductions is None


def make_groups(
    strategy: CanonicalStrategy, group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> RankGroups:
    """Create the groups that a strategy needs; all ranks of the group call together.

    Args:
        strategy: in its canonical form.
        ranks_per_node: see `node_groups`.

    Raises:
        UserError: see `node_groups`; or the ranks of a node are not consecutive.
    """
    here, across = node_groups(group, ranks_per_node)
    mesh = _mesh(group, here, across)
    members = dist.get_process_group_ranks(here)
    gathers = order = reductions = None
    updates = subgroup(group, members, "gloo")
    if len(members) > 1:
        if strategy.param_transfer == "shard":
            gathers, order = subgroup(group, members), subgroup(group, members, "gloo")
        if strategy.grad_sync == "gpu_reduce":
            reductions = subgroup(group, members)
        elif strategy.gradients.route != "native" or not strategy.gradients.plain():
            reductions = updates  # the same thread sends them
    return RankGroups(here, across, updates, gathers, order, reductions, mesh)


def gloo_group(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks; by default with the timeout of the group."""
    ranks = dist.get_process_group_ranks(group)
    wait = timeout or timeout_of(group)
    created: dist.ProcessGroup = dist.new_group(ranks, wait, "gloo", use_local_synchronization=True)
    return created


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


def node_groups(
    group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return two gloo groups of this rank; all ranks of the group call together.

    The first has the ranks of its node. The second has the ranks at the same position of every
    node, in order; None where there is one node.

    Args:
        ranks_per_node: so many consecutive ranks are a node. By default the ranks of one machine
            are, but for those that containers or emulated links separate.

    Raises:
        UserError: nodes have different numbers of ranks.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    everyone = gloo_group(group)
    keys = gather_values(rank // ranks_per_node if ranks_per_node else _node_key(), everyone)
    nodes: dict[object, list[int]] = {}
    for number, key in zip(ranks, keys, strict=True):
        nodes.setdefault(key, []).append(number)
    if len({*map(len, nodes.values())}) > 1:
        listed = ", ".join(str(len(node)) for node in nodes.values())
        raise UserError(f"slide: nodes of {listed} ranks: start equally many on each")
    if len(nodes) == 1:
        return everyone, None
    here = nodes[keys[rank]]
    position = here.index(ranks[rank])
    across = [node[position] for node in nodes.values()]
    return subgroup(group, here, "gloo"), subgroup(group, across, "gloo")


def _node_key() -> str:
    """Return a key of ranks that see one /dev/shm and one network: emulated links move threads."""
    return f"{machine_key()} {Path('/proc/thread-self/ns/net').stat().st_ino}"
