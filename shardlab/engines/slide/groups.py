"""Which ranks share a machine's memory."""

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardlab.comm.hierarchy import subgroup, timeout_of
from shardlab.core.errors import UserError
from shardlab.transport.object_collectives import gather_values


class NodeGroups(NamedTuple):
    """Two process groups that this rank is in, of gloo; training threads use `here` alone."""

    here: dist.ProcessGroup
    """the ranks of its node"""
    across: dist.ProcessGroup | None
    """the ranks at the same place of every node, in order; None where there is one node"""


_TWINS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def twin(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of gloo with the same ranks, made once: for training threads, which agree in order.

    Called by all ranks of the group together the first time.

    Args:
        timeout: how long a rank waits for others; by default as in the group.
    """
    timeout = timeout or timeout_of(group)
    twins = _TWINS.setdefault(group, {})
    if timeout not in twins:
        ranks = dist.get_process_group_ranks(group)
        twins[timeout] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return twins[timeout]


def node_groups(group: dist.ProcessGroup, ranks_per_node: int | None = None) -> NodeGroups:
    """Called by all ranks of the group together.

    Args:
        ranks_per_node: so many consecutive ranks are a node. By default the ranks of one machine
            are, but for those that containers or emulated links set apart from each other.

    Raises:
        UserError: nodes have different numbers of ranks, or those of one are not on one machine.
    """
    ranks = dist.get_process_group_ranks(group)
    everyone = twin(group)
    machines, networks = zip(*gather_values([_machine(), _network()], everyone), strict=True)
    if ranks_per_node is None:
        keys = [f"{machine} {net}" for machine, net in zip(machines, networks, strict=True)]
    else:
        keys = [str(place // ranks_per_node) for place in range(len(ranks))]
    nodes: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        nodes.setdefault(key, []).append(place)
    _check([*nodes.values()], machines)
    if len(nodes) == 1:
        return NodeGroups(everyone, None)
    mine = nodes[keys[dist.get_rank(group)]]
    here = mine.index(dist.get_rank(group))
    return NodeGroups(
        subgroup(group, [ranks[place] for place in mine], "gloo"),
        subgroup(group, [ranks[node[here]] for node in nodes.values()], "gloo"),
    )


def _machine() -> str:
    """Within it processes can map each other's files and see each other end."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _network() -> int:
    """That of this thread: emulated links move threads."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


def _check(nodes: list[list[int]], machines: tuple[str, ...]) -> None:
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        told = ", ".join(map(str, sizes))
        raise UserError(f"slide: nodes of {told} ranks: start equally many on each")
    if any(len({machines[place] for place in node}) > 1 for node in nodes):
        raise UserError(
            f"slide: ranks_per_node {sizes[0]}: ranks of one node are on different machines or "
            "in different containers: give the number that each of them has"
        )
