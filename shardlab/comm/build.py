"""Construction of the collective of a process group from the options of `attach`."""

import copy
import math
import os
from dataclasses import dataclass, replace

import torch.distributed as dist

from shardlab.codecs.base import Codec
from shardlab.codecs.identity import Identity
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.comm.all_to_all import AllToAllCollective, LinearNative
from shardlab.comm.bypass import BypassCollective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback, Updates
from shardlab.comm.hierarchy import HierarchicalCollective
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.comm.native import Native
from shardlab.core.errors import UserError


@dataclass(frozen=True)
class Route:
    """Validated options of `attach` for the messages of one kind."""

    method: Method
    native: bool = False
    """use the process group's own collectives"""
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
        """Return whether all messages are sent as without `attach`."""
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
    """Return the collective for the messages of `kind` over `group`.

    Args:
        updates: of parameters that are gathered.

    Raises:
        UserError: two levels are requested, but the ranks are not whole nodes, or the size of a
            node is unknown.
    """
    if route.untouched:
        return Native(group, ledger, kind)
    settings = CodecSettings(feedback, route.minimum_size, route.seed, updates)
    inner = _compressing(group, ledger, kind, route, settings)
    # on gloo the native reduce-scatter sends twice what is needed
    exact: Collective = Native(group, ledger, kind)
    if dist.get_backend(group) == "gloo":
        exact = AllToAllCollective(group, ledger, kind, Identity())
    plain = route.method.name == "none" and route.between_nodes is None
    shortest = math.inf if plain else route.minimum_size
    return BypassCollective(inner, exact, route.excluded, route.warmup, feedback, shortest)


def _compressing(
    group: dist.ProcessGroup, ledger: Ledger, kind: Kind, route: Route, settings: CodecSettings
) -> Collective:
    method = route.method
    if isinstance(method, MultiPhaseMethod):
        # a copy, since its state belongs to the units of one group
        return MultiPhaseCollective(group, ledger, kind, copy.deepcopy(method), settings)
    if route.between_nodes is not None:
        size = _ranks_per_node(route)
        return HierarchicalCollective(
            group, ledger, kind, method, route.between_nodes, size, settings
        )
    single_level = LinearNative if route.native else AllToAllCollective
    return single_level(group, ledger, kind, method, settings)


def _ranks_per_node(route: Route) -> int:
    if route.ranks_per_node is not None:
        return route.ranks_per_node
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    if local_size is None:
        raise UserError("between_nodes: no launcher says how large a node is: give ranks_per_node")
    return int(local_size)
