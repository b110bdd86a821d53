"""Routes of messages by the settings of a strategy, and the collectives that follow them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method
from shardlab.comm.all_to_all import AllToAllCollective, HierarchicalCollective
from shardlab.comm.codec_collective import Route
from shardlab.comm.collective import Collective, WarmUp
from shardlab.comm.feedback import Draws, ErrorFeedback
from shardlab.comm.ledger import Ledger, MessageKind
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.comm.uncompressed import Native, UncompressedAllToAll
from shardlab.core.errors import UserError
from shardlab.strategy.compression import Compression, WeightCompression


def gradient_route(settings: Compression, excluded: frozenset[str], seed: int) -> Route:
    """Return the route of gradients.

    Args:
        excluded: names of the blocks that `settings.exclude` selects.
    """
    method = make_method(settings.codec)
    if settings.plain():
        return Route(method, native=settings.route != "exchange", seed=seed)
    nodes = settings.between_nodes
    return Route(
        method,
        minimum_size=settings.minimum_size,
        excluded=excluded,
        warmup=settings.warmup_steps,
        between_nodes=None if nodes is None else make_codec(nodes),
        seed=seed,
        feedback=(
            ErrorFeedback(settings.residual, settings.decay) if settings.error_feedback else None
        ),
    )


def weight_route(settings: WeightCompression, seed: int) -> Route:
    """Return the route of gathered parameters."""
    codec, native = make_codec(settings.codec), settings.codec.name == "none"
    return Route(codec, native, settings.minimum_size, seed=seed, draws=Draws())


def between_replicas(route: Route) -> Route:
    """Return the route between replicas: one level, by the codec between nodes."""
    method = route.method if route.between_nodes is None else route.between_nodes
    return replace(route, method=method, between_nodes=None)


def make_collective(
    group: dist.ProcessGroup, ledger: Ledger, kind: MessageKind, route: Route
) -> Collective:
    """Return the collective for the messages of `kind` over `group`: of two levels where the route
    has a codec between nodes, except for a part of the ranks, as of a replica, inside a node.

    Raises:
        UserError: two levels are requested, but the ranks are not whole nodes, or the size of a
            node is unknown.
    """
    if route.native:
        return Native(group, ledger, kind)
    if route.between_nodes is not None:
        if ledger.ranks_per_node is None:
            raise UserError(
                "between_nodes: no launcher says how large a node is: give ranks_per_node"
            )
        size = dist.get_world_size(group)
        if size == dist.get_world_size() or ledger.ranks_per_node % size:
            return HierarchicalCollective(group, ledger, kind, route)
        route = replace(route, between_nodes=None)
    if route.is_plain:
        return UncompressedAllToAll(group, ledger, kind)
    if isinstance(route.method, MultiPhaseMethod):
        return MultiPhaseCollective(group, ledger, kind, route)
    return AllToAllCollective(group, ledger, kind, route)


class Collectives:
    """Collectives of an attached model, each made when its purpose first needs a group.

    Args:
        trains_alone: of replicas that synchronise rarely: returns whether gradients are no longer
            reduced between them.
    """

    def __init__(
        self,
        ledger: Ledger,
        gradients: Route,
        weights: Route,
        trains_alone: Callable[[], bool] | None = None,
    ) -> None:
        self._ledger = ledger
        self._routes: dict[str, tuple[MessageKind, Route]] = {
            "gradients": ("gradients", gradients),
            "weights": ("weights", weights),
            "replicas": ("gradients", between_replicas(gradients)),
        }
        self._trains_alone = trains_alone
        self.by_purpose: dict[str, dict[dist.ProcessGroup, Collective]] = {
            purpose: {} for purpose in self._routes
        }
        """in the order in which their groups were first used"""

    def gradients(self, group: dist.ProcessGroup) -> Collective:
        """Return the collective that reduces gradients."""
        return self._of("gradients", group)

    def weights(self, group: dist.ProcessGroup) -> Collective:
        """Return the collective that gathers parameters."""
        return self._of("weights", group)

    def replicas(self, group: dist.ProcessGroup) -> Collective:
        """Return the collective that reduces gradients between replicas of a sharded model."""
        return self.until_alone(self._of("replicas", group))

    def until_alone(self, collective: Collective) -> Collective:
        """Return the collective, which sends nothing once replicas train alone."""
        return collective if self._trains_alone is None else WarmUp(collective, self._trains_alone)

    def close(self) -> None:
        """Release the process groups that the collectives have made."""
        for by_group in self.by_purpose.values():
            for collective in by_group.values():
                collective.close()

    def _of(self, purpose: str, group: dist.ProcessGroup) -> Collective:
        by_group = self.by_purpose[purpose]
        if group not in by_group:
            by_group[group] = make_collective(group, self._ledger, *self._routes[purpose])
        return by_group[group]


class Attachable(ABC):
    """Module whose collectives `attach` can set without an import of its class."""

    is_attached = False
    """whether it has collectives already, which stay"""
    replica_group: dist.ProcessGroup | None = None
    """ranks that hold the same shards of other replicas of the model, where there are some"""

    @abstractmethod
    def attach_collectives(self, collectives: Collectives) -> None:
        """Use these collectives for the module's process groups."""

    @abstractmethod
    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each unit, which is sent as one flat vector."""
