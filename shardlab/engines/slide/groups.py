"""Process groups of a node's ranks, and a pool from which the engines of a process take them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.object_collectives import gather_values, subgroup, timeout_of
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.errors import UserError
from shardlab.engines.flat import REPLICATE, SHARD

Value = TypeVar("Value")

_TWINS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def twin(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, for training threads, which agree in order.

    It is created once. All ranks of the group call together the first time.

    Args:
        timeout: how long a rank waits for others; by default as in the group.
    """
    timeout = timeout or timeout_of(group)
    twins = _TWINS.setdefault(group, {})
    if timeout not in twins:
        ranks = dist.get_process_group_ranks(group)
        twins[timeout] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return twins[timeout]


@dataclass(eq=False)
class PooledGroups(Generic[Value]):
    """Process groups that one engine uses at a time."""

    value: Value
    purpose: Hashable
    free: bool = False
    _discarded: bool = False

    def release(self) -> None:
        """Return the groups to the pool, unless they were discarded; no one may use them then."""
        self.free = not self._discarded

    def discard(self) -> None:
        """Take the groups out of the pool: messages that were broken off may still arrive."""
        self.free, self._discarded = False, True


class GroupPool:
    """Process groups that engines of one process use one after another.

    What torch opens for a group stays open until all of its ranks destroy it at one time, and an
    engine is collected at any time. Engines that are alive share none: their threads communicate
    each in an order of its own.
    """

    def __init__(self) -> None:
        # in the same order on all ranks of a group, so that a position names an entry everywhere
        self._entries: WeakKeyDictionary[dist.ProcessGroup, list[PooledGroups[Any]]] = (
            WeakKeyDictionary()
        )

    def acquire(
        self, group: dist.ProcessGroup, purpose: Hashable, create: Callable[[], Value]
    ) -> PooledGroups[Value]:
        """Return an entry for the purpose that is free on all ranks of the group, or a new one.

        All ranks of the group call together, with equal purposes.
        """
        entries = self._entries.setdefault(group, [])
        free = [n for n, entry in enumerate(entries) if entry.free and entry.purpose == purpose]
        everywhere = set(free).intersection(*gather_values(free, twin(group)))
        if everywhere:
            entry = entries[min(everywhere)]
            entry.free = False
        else:
            entry = PooledGroups(create(), purpose)
            entries.append(entry)
        return entry


_POOL = GroupPool()


@dataclass(frozen=True)
class RankGroups:
    """The process groups of a `slide` engine."""

    here: dist.ProcessGroup
    """the ranks of the node"""
    across: dist.ProcessGroup | None
    """those that update the same chunk on other nodes, where there are any"""
    gathers: dist.ProcessGroup | None
    """of the node, for parameters on the device; None: every rank loads whole units"""
    reductions: dist.ProcessGroup | None
    """of the node, for gradients on the device or in host memory; None: ranks sum slots"""
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
        """Return whether an update adds up the slots of all ranks of the node."""
        return self.world_size > 1 and self.reductions is None


class _Purpose(NamedTuple):
    """Settings that the process groups of a strategy depend on."""

    gathers: bool
    reductions: Literal["device", "memory"] | None
    ranks_per_node: int | None

    @classmethod
    def of(cls, strategy: CanonicalStrategy, ranks_per_node: int | None) -> "_Purpose":
        """Return those of a strategy in its canonical form."""
        summed = strategy.gradients.route == "native" and strategy.gradients.plain()
        reductions: Literal["device", "memory"] | None = None if summed else "memory"
        if strategy.grad_sync == "gpu_reduce":
            reductions = "device"
        return cls(strategy.param_transfer == "shard", reductions, ranks_per_node)


def acquire_groups(
    strategy: CanonicalStrategy, group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> PooledGroups[RankGroups]:
    """Return the groups that a strategy needs, from the pool; all ranks of the group call together.

    Args:
        strategy: in its canonical form.
        ranks_per_node: see `node_groups`.

    Raises:
        UserError: see `node_groups`; or the ranks of a node are not consecutive.
    """
    purpose = _Purpose.of(strategy, ranks_per_node)
    return _POOL.acquire(group, purpose, lambda: _create(group, purpose))


def _create(group: dist.ProcessGroup, purpose: _Purpose) -> RankGroups:
    here, across = node_groups(group, purpose.ranks_per_node)
    mesh = _mesh(group, here, across)
    gathers = reductions = None
    if dist.get_world_size(here) > 1:
        members = dist.get_process_group_ranks(here)
        if purpose.gathers:
            gathers = subgroup(group, members)
        if purpose.reductions is not None:
            backend = "gloo" if purpose.reductions == "memory" else None
            reductions = subgroup(group, members, backend)
    return RankGroups(here, across, gathers, reductions, mesh)


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

    The first has the ranks of its node, and is the one of training threads. The second has the
    ranks at the same position of every node, in order; None where there is one node.

    Args:
        ranks_per_node: so many consecutive ranks are a node. By default the ranks of one machine
            are, but for those that containers or emulated links separate.

    Raises:
        UserError: nodes have different numbers of ranks, or those of one are not on one machine.
    """
    ranks = dist.get_process_group_ranks(group)
    everyone = twin(group)
    machines, networks = zip(*gather_values([_machine(), _network()], everyone), strict=True)
    if ranks_per_node is None:
        keys = [f"{machine} {net}" for machine, net in zip(machines, networks, strict=True)]
    else:
        keys = [str(position // ranks_per_node) for position in range(len(ranks))]
    nodes: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        nodes.setdefault(key, []).append(position)
    _check_nodes([*nodes.values()], machines)
    if len(nodes) == 1:
        return everyone, None
    mine = nodes[keys[dist.get_rank(group)]]
    here = mine.index(dist.get_rank(group))
    return (
        subgroup(group, [ranks[position] for position in mine], "gloo"),
        subgroup(group, [ranks[node[here]] for node in nodes.values()], "gloo"),
    )


def _machine() -> str:
    """Return a key of processes that can map each other's files and see each other end."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _network() -> int:
    """Return the network namespace of this thread: emulated links move threads."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


def _check_nodes(nodes: list[list[int]], machines: tuple[str, ...]) -> None:
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        listed = ", ".join(map(str, sizes))
        raise UserError(f"slide: nodes of {listed} ranks: start equally many on each")
    if any(len({machines[position] for position in node}) > 1 for node in nodes):
        raise UserError(
            f"slide: ranks_per_node {sizes[0]}: ranks of one node are on different machines or "
            "in different containers: give the number that each of them has"
        )
