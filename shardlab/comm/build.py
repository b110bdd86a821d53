"""Construction of the collective of a process group, from all its classes."""

import copy
import os
from dataclasses import dataclass, replace

import torch.distributed as dist

from shardlab.codecs.base import Codec
from shardlab.codecs.identity import Identity
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.bypass import BypassCollective
from shardlab.comm.collective import Collective, Native
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.hierarchy import HierarchicalCollective
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.linear import LinearNative
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.comm.steps import Updates
from shardlab.core.errors import UserError


@dataclass(frozen=True)
class Route:
    """Validated options of `attach` for the messages of one kind."""

    method: Method
    native: bool = False
    """by the group's own collective"""
    minimum_size: int = 0
    excluded: frozenset[str] = frozenset()
    """names of blocks that are sent uncompressed"""
    warmup: int = 0
    """messages of each unit that are sent uncompressed"""
    between_nodes: Codec | None = None
    ranks_per_node: int | None = None
    seed: int = 0

    @property
    def untouched(self) -> bool:
        """Whether everything is sent as it would be without `attach`."""
        return self.native and self.method.name == "none" and self.between_nodes is None


def between_replicas(route: Route) -> Route:
    """Return the route between replicas: one level, by the codec between nodes."""
    method = route.method if route.between_nodes is None else route.between_nodes
    return replace(route, method=method, between_nodes=None, ranks_per_node=None)


def make_collective(
    group: dist.ProcessGroup,
    ledger: Ledger,
    kind: Kind,
    route: Route,
    feedback: ErrorFeedback | None = None,
    updates: Updates | None = None,
) -> Collective:
    """Return the collective that moves the messages of `kind` over `group`.

    Args:
        updates: of parameters that are gathered.

    Raises:
        UserError: two levels are asked for, but the ranks are not whole nodes, or nobody says how
            large a node is.
    """
    if route.untouched:
        return Native(group, ledger, kind)
    # on gloo the native reduce-scatter moves twice what is needed
    exact: Collective = Native(group, ledger, kind)
    if dist.get_backend(group) == "gloo":
        exact = AllToAllCollective(group, ledger, kind, Identity())
    inner = _compressing(group, ledger, kind, route, feedback, updates)
    ranks_per_node = inner.ranks_per_node if isinstance(inner, HierarchicalCollective) else 0
    return BypassCollective(inner, exact, route.excluded, route.warmup, feedback, ranks_per_node)


def _compressing(
    group: dist.ProcessGroup,
    ledger: Ledger,
    kind: Kind,
    route: Route,
    feedback: ErrorFeedback | None,
    updates: Updates | None,
) -> Collective:
    method, minimum_size, seed = route.method, route.minimum_size, route.seed
    if isinstance(method, MultiPhaseMethod):
        # a copy, since its state belongs to the units of one group
        method = copy.deepcopy(method)
        return MultiPhaseCollective(
            group, ledger, kind, method, feedback=feedback, minimum_size=minimum_size, seed=seed
        )
    if route.between_nodes is not None:
        return HierarchicalCollective(
            group,
            ledger,
            kind,
            inside=method,
            between=route.between_nodes,
            ranks_per_node=_ranks_per_node(route),
            feedback=feedback,
            minimum_size=minimum_size,
            seed=seed,
        )
    if route.native:
        return LinearNative(
            group, ledger, kind, method, feedback=feedback, minimum_size=minimum_size, seed=seed
        )
    return AllToAllCollective(
        group,
        ledger,
        kind,
        method,
        feedback=feedback,
        minimum_size=minimum_size,
        seed=seed,
        updates=updates,
    )


def _ranks_per_node(route: Route) -> int:
    """Return the number as given, else that of the launcher."""
    if route.ranks_per_node is not None:
        return route.ranks_per_node
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    if local_size is None:
        raise UserError("between_nodes: no launcher says how large a node is: give ranks_per_node")
    return int(local_size)
