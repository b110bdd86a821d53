"""`attach`: compressed communication of an FSDP2, FSDP1 or DDP model in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method, spec_of
from shardlab.comm.all_to_all import AllToAllCollective, HierarchicalCollective
from shardlab.comm.background import Lanes
from shardlab.comm.codec_collective import Route
from shardlab.comm.collective import Attachable, Collective, MakeCollective, WarmUp
from shardlab.comm.exchanges import Exchanges
from shardlab.comm.feedback import Draws, ErrorFeedback, Residual
from shardlab.comm.fsdp2_hooks import replica_group
from shardlab.comm.handle import Handle
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.multi_phase import MultiPhaseCollective
from shardlab.comm.object_collectives import release, subgroup
from shardlab.comm.optimizer_steps import count_steps, on_update, unwrapped
from shardlab.comm.rare_sync import RareSync
from shardlab.comm.uncompressed import Native, UncompressedAllToAll
from shardlab.comm.wrappers import (
    Makers,
    attach_wrapper,
    check_wrapper,
    excluded_blocks,
    find_wrapper,
    message_names,
)
from shardlab.core.document import validate
from shardlab.core.errors import UserError, warn_script, without_frames
from shardlab.kernels import native
from shardlab.strategy.compression import Compression, WeightCompression
from shardlab.strategy.sync import MINIMUM_SIZE, Sync

Spec = str | Mapping[str, Any] | BaseModel | Codec


def between_replicas(route: Route) -> Route:
    """Return the route between replicas: one level, by the codec between nodes."""
    method = route.method if route.between_nodes is None else route.between_nodes
    return replace(route, method=method, between_nodes=None)


def make_collective(
    group: dist.ProcessGroup, ledger: Ledger, kind: Kind, route: Route
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


@without_frames
def attach(
    model: nn.Module,
    gradients: Spec | Method = "none",
    weights: Spec = "none",
    *,
    error_feedback: bool = False,
    residual: Residual = "fp32",
    decay: float = 1.0,
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
    sync_every: int | None = None,
    outer: Mapping[str, Any] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Handle:
    """Compress the gradients (and gathered parameters) of `model`, and count every byte.

    All ranks call with the same arguments, once, after the last `fully_shard` and before the first
    forward pass. The ledger lists what was sent uncompressed, and why.

    Args:
        model: wrapped by `fully_shard`, FullyShardedDataParallel or DistributedDataParallel, or a
            module around such a model.
        gradients: codec by name with options (`"int8:group=64"`), as a mapping, or as an object.
        weights: codec of the parameters that are gathered.
        error_feedback: add what was not sent to the next gradient of the same unit.
        residual: storage of that: fp32, bf16 or int8.
        decay: factor of that, from one message of a unit to the next.
        route: native (the group's own collective, default for `none`) or exchange (all-to-all).
        minimum_size, weights_minimum_size: messages of fewer elements are sent uncompressed.
        exclude: patterns (`"*.bias"`) of parameters whose gradients are sent uncompressed.
        warmup_steps: first gradient messages of each unit that are sent uncompressed.
        between_nodes: codec between nodes, and between replicas; `gradients` is that inside nodes.
        ranks_per_node: size of a node; by default that of the launcher.
        overlap: overlap communication with computation on CPUs, for `fully_shard`, as far as the
            model prefetches. Backward ends when all gradients are reduced.
        replicas: with FullyShardedDataParallel, and with `sync_every` and `fully_shard` over one
            dimension, the ranks that hold this shard of other replicas.
        seed: of random codecs; the same on all ranks.
        sync_every: iterations between two synchronisations of the parameters of replicas, in place
            of the gradients of every step (`shardlab.comm.rare_sync`).
        outer: more options of that: `shardlab.strategy.sync.Sync`, without `every`.
        optimizer: one, or several, that step once per iteration; without it call `handle.step()` at
            the end of each.

    Raises:
        UserError: in one line: options that do not fit each other or the model, or no wrapper.
    """
    settings = {
        "codec": gradients,
        "between_nodes": between_nodes,
        "route": route,
        "error_feedback": error_feedback,
        "residual": residual,
        "decay": decay,
        "minimum_size": minimum_size,
        "exclude": (exclude,) if isinstance(exclude, str) else tuple(exclude),
        "warmup_steps": warmup_steps,
        "ranks_per_node": ranks_per_node,
    }
    gathered = {"codec": weights, "minimum_size": weights_minimum_size}
    if sync_every is None:
        if outer is not None or optimizer is not None:
            raise UserError("attach: outer and optimizer are for sync_every: give it, or none")
        return _attach(model, settings, gathered, overlap, replicas, seed)
    outer = {} if outer is None else outer
    if not isinstance(outer, Mapping) or "every" in outer:
        raise UserError('attach: outer is a mapping, as {"codec": "int4"}; every is sync_every')
    if warmup_steps and gradients == "none" and between_nodes is None:
        raise UserError('attach: warmup_steps is of codecs: give outer={"warmup_steps": ...}')
    if type(sync_every) is not int or sync_every < 1:
        raise UserError(f"attach: sync_every must be a whole number above 0 (found {sync_every!r})")
    given = {**outer, "every": sync_every, "codec": spec_of(outer.get("codec", "none"))}
    sync = validate(Sync, given, "attach: outer")
    return _attach(model, settings, gathered, overlap, replicas, seed, sync, unwrapped(optimizer))


def _attach(
    model: nn.Module,
    for_gradients: dict[str, Any],
    for_weights: dict[str, Any],
    overlap: bool,
    replicas: dist.ProcessGroup | None,
    seed: int,
    sync: Sync | None = None,
    optimizers: Sequence[Optimizer] = (),
) -> Handle:
    gradients, weights = _gradient_route(for_gradients, seed), _weight_route(for_weights, seed)
    wrapper = find_wrapper(model)
    check_wrapper(model, wrapper, weights, overlap)
    overlap = overlap and _can_overlap()
    _check_replicas(wrapper, gradients, replicas, sync)
    excluded = excluded_blocks(model, wrapper, for_gradients["exclude"])
    if not gradients.is_plain:
        gradients = replace(gradients, excluded=excluded)
    if not (gradients.is_plain and weights.is_plain and sync is None):
        # a source tree builds its kernels now: in the first message other ranks would wait
        native.compiled(next(model.parameters(), torch.empty(0)))
    ledger, lanes = Ledger(for_gradients["ranks_per_node"]), Lanes() if overlap else None
    collectives: dict[str, dict[dist.ProcessGroup, Collective]] = {}

    def maker(purpose: str, kind: Kind, route: Route) -> MakeCollective:
        made = collectives.setdefault(purpose, {})

        def make(group: dist.ProcessGroup) -> Collective:
            if group not in made:
                made[group] = make_collective(group, ledger, kind, route)
            return made[group]

        return make

    makers = (
        maker("gradients", "gradients", gradients),
        maker("weights", "weights", weights),
        maker("replicas", "gradients", between_replicas(gradients)),
    )

    def close() -> None:
        for made in collectives.values():
            for collective in made.values():
                collective.close()

    undo, rare = [close], None
    """what `detach` calls, the last one first"""
    if sync is not None:
        rare = _rare_sync(model, wrapper, sync, ledger, replicas, seed, undo)
        makers = _until_warm(wrapper, makers, rare)
    undo.append(attach_wrapper(model, wrapper, makers, lanes, replicas))
    if gradients.feedback is not None:
        undo.append(on_update(gradients.feedback.updated, model.parameters))
    if rare is not None:
        undo += [count_steps(model, rare, optimizers), rare.detach]

    def detach() -> None:
        while undo:
            undo.pop()()

    units = message_names(model, wrapper)
    draws = None if weights.native else weights.draws
    one_rank = all(dist.get_world_size(group) == 1 for group in collectives["gradients"])
    sends = not (one_rank and isinstance(wrapper, FSDPModule | FullyShardedDataParallel))
    return Handle(ledger, gradients.feedback, draws, collectives, units, lanes, detach, sends, rare)


def _rare_sync(
    model: nn.Module,
    wrapper: nn.Module,
    settings: Sync,
    ledger: Ledger,
    replicas: dist.ProcessGroup | None,
    seed: int,
    undo: list[Callable[[], None]],
) -> RareSync:
    """Return the synchronisation of the replicas of a model.

    Args:
        undo: gets what `detach` has to call.

    Raises:
        UserError: there are no replicas, or none is possible for this wrapper.
    """
    if isinstance(wrapper, DistributedDataParallel):
        group = wrapper.process_group
        if wrapper.find_unused_parameters:
            raise UserError(
                "attach: find_unused_parameters sends a map in every step: wrap without it "
                "(transformers' Trainer: ddp_find_unused_parameters=False)"
            )
        if wrapper.parameters_to_ignore:
            raise UserError(
                f"attach: DistributedDataParallel ignores {min(wrapper.parameters_to_ignore)}, and "
                "sync_every would not: freeze it"
            )
        model = wrapper.module
    elif isinstance(wrapper, FSDPModule):
        group = replica_group(model, replicas, settings.warmup_steps)
    elif isinstance(wrapper, Attachable) and wrapper.replica_group is not None:
        group = wrapper.replica_group
    else:
        raise UserError(
            "attach: sync_every is for fully_shard and DistributedDataParallel: use one of them"
        )
    codec = make_codec(settings.codec)
    if codec.votes:
        raise UserError(f"attach: outer: {codec.name!r} votes, and outer needs means")
    if (warning := settings.left_out()) and dist.get_rank() == 0:
        warn_script(f"attach: outer: {warning}")
    feedback = ErrorFeedback(decay=settings.decay) if settings.error_feedback else None
    ledger.gradients_of_step = _gradient_bytes(model, dist.get_world_size(group))
    if settings.delay:
        # synchronisation runs in a thread, and collectives of one group need one order
        group = subgroup(group, dist.get_process_group_ranks(group))
        undo.append(partial(release, [group]))
    # others stay this rank's, as torch says of them without broadcast_buffers
    averages = isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers
    exact = Native(group, ledger, "gradients", extra=True) if averages else None
    route = Route(codec, codec.name == "none", MINIMUM_SIZE, seed=seed, feedback=feedback)
    collective = make_collective(group, ledger, "gradients", route)
    return RareSync(model, settings, Exchanges(model, settings, collective, exact, feedback))


def _can_overlap() -> bool:
    """Return whether torch can overlap communication of `fully_shard`; warn where it cannot."""
    able = hasattr(FSDPModule, "set_separate_reduce_scatter_group")
    if not able and dist.get_rank() == 0:
        warn_script(
            "attach: overlap, and prefetch of fsdp2 on a CPU, need torch 2.13 or newer: without it "
            "communication blocks"
        )
    return able


def _gradient_bytes(model: nn.Module, replicas: int) -> float:
    """Return the bytes that this rank would send for the gradients of a step, uncompressed."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
    return 2 * (replicas - 1) / replicas * sum(part.nbytes for part in parts)


def _until_warm(wrapper: nn.Module, makers: Makers, sync: RareSync) -> Makers:
    """Return the makers, with the gradients between replicas sent in the warm-up alone."""
    gradients, weights, between = makers

    def until_warm(make: MakeCollective) -> MakeCollective:
        return lambda group: WarmUp(make(group), lambda: sync.step >= sync.settings.warmup_steps)

    if isinstance(wrapper, DistributedDataParallel):
        return until_warm(gradients), weights, between
    return gradients, weights, until_warm(between)


def _gradient_route(options: dict[str, Any], seed: int) -> Route:
    """Return the validated route of gradients, without the excluded blocks."""
    method, between, level = make_method(options["codec"]), options["between_nodes"], None
    if between is not None:
        between, level = make_codec(between), spec_of(between)
    specs = {"codec": spec_of(options["codec"]), "between_nodes": level}
    checked = validate(Compression, {**options, **specs}, "attach")
    if checked.plain():
        return Route(method, checked.route != "exchange", seed=seed)
    if (warning := checked.left_out()) and dist.get_rank() == 0:
        warn_script(f"attach: {warning}")
    feedback = ErrorFeedback(checked.residual, checked.decay) if checked.error_feedback else None
    size, warmup = checked.minimum_size, checked.warmup_steps
    return Route(method, False, size, frozenset(), warmup, between, seed, feedback)


def _weight_route(options: dict[str, Any], seed: int) -> Route:
    codec = make_codec(options["codec"])
    validate(WeightCompression, {**options, "codec": spec_of(options["codec"])}, "attach: weights")
    return Route(codec, codec.name == "none", options["minimum_size"], seed=seed, draws=Draws())


def _check_replicas(
    wrapper: nn.Module, gradients: Route, replicas: dist.ProcessGroup | None, sync: Sync | None
) -> None:
    """Raise `UserError` for `replicas`, and for codecs, without effect."""
    if replicas is not None:
        if sync is None and not isinstance(wrapper, FullyShardedDataParallel):
            raise UserError("attach: replicas is for FullyShardedDataParallel: remove it")
        if sync is not None and not isinstance(wrapper, FSDPModule):
            raise UserError("attach: with sync_every replicas is for fully_shard: remove it")
    alone = isinstance(wrapper, DistributedDataParallel) and not gradients.is_plain
    if sync is None or sync.warmup_steps or not (alone or gradients.between_nodes):
        return
    raise UserError(
        "attach: no gradients are sent between replicas: give their codec in "
        'outer={"codec": ...}, or outer={"warmup_steps": ...}'
    )
