"""`attach`: compressed communication of an FSDP2, FSDP1 or DDP model in one call."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method, spec_of
from shardlab.comm.all_to_all import AllToAllCollective, HierarchicalCollective, LinearNative
from shardlab.comm.background import Lanes
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.collective import Attachable, Collective
from shardlab.comm.comm_hooks import attach_ddp, attach_fsdp1, unit_names
from shardlab.comm.feedback import ErrorFeedback, Residual, Updates, register_step_hook
from shardlab.comm.fsdp2_hooks import attach_fsdp2
from shardlab.comm.handle import GroupCollectives, Handle
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.comm.uncompressed import Native, UncompressedAllToAll
from shardlab.config.compression import Compression, WeightCompression
from shardlab.core.device import accelerator_of
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.models.units import matching, parameter_names, whole_units

Detach = Callable[[], None]
Spec = str | Mapping[str, Any] | BaseModel | Codec


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
    method, seed = route.method, route.seed
    if method.name == "none" and route.between_nodes is None:
        return UncompressedAllToAll(group, ledger, kind)
    settings = CodecSettings(
        feedback, route.minimum_size, seed, updates, route.excluded, route.warmup
    )
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


def attach(
    model: nn.Module,
    gradients: Spec | Method = "none",
    weights: Spec = "none",
    *,
    error_feedback: bool = False,
    residual: Residual = "fp32",
    route: Literal["native", "exchange"] | None = None,
    minimum_size: int = 1024,
    exclude: Sequence[str] = (),
    warmup_steps: int = 0,
    between_nodes: Spec | None = None,
    ranks_per_node: int | None = None,
    weights_minimum_size: int = 1024,
    overlap: bool = False,
    replicas: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Handle:
    """Compress the gradients (and gathered parameters) of `model`, and count every byte.

    Args:
        model: wrapped by `fully_shard`, FullyShardedDataParallel or DistributedDataParallel, or a
            module around such a model. All ranks call with the same arguments, before the first
            forward pass.
        gradients: codec by name with options (`"int8:group=64"`), as a mapping, or as an object.
        weights: codec of the parameters that `fully_shard` or FullyShardedDataParallel gathers.
        error_feedback: add what was not sent to the next gradient of the same unit.
        residual: storage of that: fp32, bf16 or int8.
        route: native (the group's own collective) or exchange (all-to-all of payloads); by default
            native for `none` and exchange for the others.
        minimum_size: gradient messages with fewer elements are sent uncompressed.
        exclude: patterns of the names of parameters (`"*.bias"`) whose gradients are sent
            uncompressed.
        warmup_steps: gradient messages of each unit, from the start, that are sent uncompressed.
        between_nodes: codec of a second level between nodes; `gradients` is that inside nodes. On a
            two-dimensional mesh it is also that between replicas.
        ranks_per_node: size of a node; by default that of the launcher.
        weights_minimum_size: gathered parameters of fewer elements are sent uncompressed.
        overlap: overlap communication with computation, for `fully_shard` on devices without
            streams, as far as the model prefetches. After backward call `handle.drain()`, before
            gradients are read.
        replicas: FullyShardedDataParallel over a part of the ranks: the group of the ranks that
            hold the same shard of other replicas, over which gradients are averaged too.
        seed: of random codecs.

    The ledger lists what was sent uncompressed, and why.

    Raises:
        UserError: in one line: unknown codec or option, options that do not fit each other or the
            model, a pattern that matches nothing, a model that is not wrapped.
    """
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    method, weight_codec = make_method(gradients), make_codec(weights)
    between = None if between_nodes is None else make_codec(between_nodes)
    plain = method.name == "none" and between is None
    native = plain if route is None else route == "native"
    if native and not (isinstance(method, Codec) and method.linear and between is None):
        raise UserError(f"codec {method.name!r} cannot be summed on the wire: use route='exchange'")
    options = {
        "codec": spec_of(gradients),
        "between_nodes": None if between_nodes is None else spec_of(between_nodes),
        "error_feedback": error_feedback,
        "residual": residual,
        "minimum_size": minimum_size,
        "exclude": patterns,
        "warmup_steps": warmup_steps,
        "ranks_per_node": ranks_per_node,
    }
    validate(Compression, options, "attach")
    for_weights = {"codec": spec_of(weights), "minimum_size": weights_minimum_size}
    validate(WeightCompression, for_weights, "attach: weights")
    wrapped = _find(model, replicas)
    if weight_codec.name != "none" and wrapped.whole_weights is not None:
        raise UserError(f"attach: {wrapped.whole_weights}: remove weights, or use fully_shard")
    if overlap and not wrapped.overlaps:
        raise UserError("attach: overlap is for fully_shard: remove it")
    if overlap and any(accelerator_of(each.device) for each in model.parameters()):
        raise UserError(
            "attach: overlap is for CPUs: fully_shard overlaps on the streams of a GPU: remove it"
        )
    if replicas is not None and not wrapped.takes_replicas:
        raise UserError("attach: replicas is for FullyShardedDataParallel: remove it")
    excluded = wrapped.excluded(patterns)
    if plain:
        minimum_size, excluded, warmup_steps = 0, frozenset(), 0
    return _attach_routes(
        model,
        wrapped,
        Route(method, native, minimum_size, excluded, warmup_steps, between, ranks_per_node, seed),
        Route(weight_codec, weight_codec.name == "none", weights_minimum_size, seed=seed),
        ErrorFeedback(residual) if error_feedback else None,
        Lanes() if overlap else None,
    )


class _Wrapped(NamedTuple):
    """Model by the way it is wrapped."""

    attach: Callable[
        [GroupCollectives, GroupCollectives, GroupCollectives, Lanes | None], Callable[[], None]
    ]
    """with the collectives of gradients, of weights, and of gradients between replicas"""
    excluded: Callable[[Sequence[str]], frozenset[str]]
    """names of blocks, from patterns of parameters"""
    whole_weights: str | None = None
    """why weights cannot be compressed"""
    overlaps: bool = False
    """whether communication can overlap with computation"""
    takes_replicas: bool = False
    """whether the group of replicas is an argument"""


def _find(model: nn.Module, between: dist.ProcessGroup | None) -> _Wrapped:
    """Return the wrapper, which may be a submodule of `model`."""
    kinds = Attachable, FSDPModule, FullyShardedDataParallel, DistributedDataParallel
    found = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if isinstance(found, Attachable):
        return _Wrapped(
            lambda gradients, weights, replicas, _: found.attach_collectives(
                gradients, weights, replicas
            ),
            lambda patterns: whole_units(found.unit_names(), patterns),
        )
    if isinstance(found, FSDPModule):
        return _Wrapped(
            lambda *collectives: attach_fsdp2(model, *collectives),
            lambda patterns: matching(patterns, parameter_names(model).values()),
            overlaps=True,
        )
    if isinstance(found, FullyShardedDataParallel):
        return _Wrapped(
            lambda gradients, weights, replicas, _: attach_fsdp1(
                model, gradients, weights, replicas, between
            ),
            lambda patterns: whole_units(unit_names(model), patterns),
            takes_replicas=True,
        )
    if isinstance(found, DistributedDataParallel):
        return _Wrapped(
            lambda gradients, *_: attach_ddp(found, gradients),
            lambda patterns: matching(patterns, parameter_names(found.module).values()),
            "DistributedDataParallel gathers no parameters",
        )
    raise UserError(
        f"attach: {type(model).__name__} is wrapped neither by fully_shard nor by "
        "FullyShardedDataParallel or DistributedDataParallel: wrap it first"
    )


def _attach_routes(
    model: nn.Module,
    wrapped: _Wrapped,
    gradients: Route,
    weights: Route,
    feedback: ErrorFeedback | None,
    lanes: Lanes | None,
) -> Handle:
    ledger, updates = Ledger(), Updates()

    def collectives(purpose: str, route: Route) -> GroupCollectives:
        kind: Kind = "weights" if purpose == "weights" else "gradients"
        state = (None, updates) if kind == "weights" else (feedback, None)
        return GroupCollectives(
            purpose, lambda group: make_collective(group, ledger, kind, route, *state)
        )

    kinds = (
        collectives("gradients", gradients),
        collectives("weights", weights),
        collectives("replicas", between_replicas(gradients)),
    )
    undo, stateful = [wrapped.attach(*kinds, lanes)], list[GroupCollectives | Updates](kinds)
    listeners: list[ErrorFeedback | Updates] = [] if feedback is None else [feedback]
    if not weights.untouched:
        listeners.append(updates)
        stateful.append(updates)
    undo += [register_step_hook(model, each) for each in listeners]

    def detach() -> None:
        for each in undo:
            each()

    return Handle(ledger, feedback, stateful, listeners, lanes, detach)
