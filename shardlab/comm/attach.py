"""One call that compresses what somebody else's FSDP2, FSDP1 or DDP model communicates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method
from shardlab.codecs.registry import make_codec, make_method, spec_of
from shardlab.comm.build import Route, between_replicas, make_collective
from shardlab.comm.collective import Attachable, Collective
from shardlab.comm.ddp_hooks import attach_ddp
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.fsdp1_hooks import attach_fsdp1, unit_names
from shardlab.comm.fsdp2_hooks import attach_fsdp2
from shardlab.comm.handle import Handle, PerGroup, Stateful
from shardlab.comm.ledger import Ledger
from shardlab.comm.names import matching, parameter_names, whole_units
from shardlab.comm.residuals import Residual
from shardlab.comm.steps import StepListener, Updates, register_step_hook
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.strategy.compression import Compression, WeightCompression
from shardlab.transport.background import Lanes

Spec = str | Mapping[str, Any] | BaseModel | Codec


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
    """Sends the gradients (and gathered parameters) of `model` through codecs; counts every byte.

    Args:
        model: wrapped by `fully_shard`, FullyShardedDataParallel or DistributedDataParallel, or a
            module around such a model. All ranks call with the same arguments, before the first
            forward pass.
        gradients: codec by name with options (`"int8:group=64"`), as a mapping, or as an object.
        weights: codec of the parameters that `fully_shard` or FullyShardedDataParallel gathers.
        error_feedback: what was not sent is added to the next gradient of the same unit.
        residual: how error feedback stores that: fp32, bf16 or int8.
        route: native (the group's own collective) or exchange (all-to-all of payloads); by default
            native for `none` and exchange for the others.
        minimum_size: gradient messages with fewer elements are sent uncompressed.
        exclude: patterns of the names of parameters (`"*.bias"`) whose gradients travel
            uncompressed.
        warmup_steps: gradient messages of each unit, from the start, that are sent uncompressed.
        between_nodes: codec of a second level between nodes; `gradients` serves inside them. On a
            two-dimensional mesh it also serves between replicas.
        ranks_per_node: size of a node; by default as the launcher says.
        weights_minimum_size: gathered parameters of fewer elements are sent uncompressed.
        overlap: `fully_shard` on devices without streams, where torch communicates and computes by
            turns: communication runs beside computation as far as the model prefetches. After
            backward call `handle.drain()`, before anybody reads a gradient.
        replicas: FullyShardedDataParallel over a part of the ranks: those that hold the same shard
            of other copies of the model, over which gradients are averaged too.
        seed: of random codecs.

    The ledger says what was sent uncompressed, and why.

    Raises:
        UserError: in one line: unknown codec or option, options that do not fit each other or the
            model, a pattern that matches nothing, a model that nobody wrapped.
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
    if replicas is not None and not wrapped.takes_replicas:
        raise UserError("attach: replicas is for FullyShardedDataParallel: remove it")
    excluded = wrapped.excluded(patterns)
    if plain:
        minimum_size, excluded, warmup_steps = 0, frozenset(), 0
    return _wire(
        model,
        wrapped,
        Route(method, native, minimum_size, excluded, warmup_steps, between, ranks_per_node, seed),
        Route(weight_codec, weight_codec.name == "none", weights_minimum_size, seed=seed),
        ErrorFeedback(residual) if error_feedback else None,
        Lanes() if overlap else None,
    )


class _Wrapped(NamedTuple):
    """What differs between the ways to wrap a model."""

    attach: Callable[[PerGroup, PerGroup, PerGroup, Lanes | None], Callable[[], None]]
    """with the collectives of gradients, of weights, and of gradients between replicas"""
    excluded: Callable[[Sequence[str]], frozenset[str]]
    """names of blocks, from patterns of parameters"""
    whole_weights: str | None = None
    """why no codec can serve weights"""
    overlaps: bool = False
    """whether communication can run beside computation"""
    takes_replicas: bool = False
    """whether somebody has to say which ranks hold copies"""


def _find(model: nn.Module, replicas: dist.ProcessGroup | None) -> _Wrapped:
    """The wrapper, which may lie inside of `model`."""
    for module in model.modules():
        if isinstance(module, Attachable):
            return _ours(module)
        if isinstance(module, FSDPModule):
            return _fsdp2(model)
        if isinstance(module, FullyShardedDataParallel):
            return _fsdp1(model, replicas)
        if isinstance(module, DistributedDataParallel):
            return _ddp(module)
    raise UserError(
        f"attach: {type(model).__name__} is wrapped neither by fully_shard nor by "
        "FullyShardedDataParallel or DistributedDataParallel: wrap it first"
    )


def _ours(model: Attachable) -> _Wrapped:
    return _Wrapped(
        lambda gradients, weights, replicas, _: model.attach_collectives(
            gradients, weights, replicas
        ),
        lambda patterns: whole_units(model.unit_names(), patterns),
    )


def _fsdp2(model: nn.Module) -> _Wrapped:
    return _Wrapped(
        lambda *collectives: attach_fsdp2(model, *collectives),
        lambda patterns: matching(patterns, parameter_names(model).values()),
        overlaps=True,
    )


def _fsdp1(model: nn.Module, between: dist.ProcessGroup | None) -> _Wrapped:
    return _Wrapped(
        lambda gradients, weights, replicas, _: attach_fsdp1(
            model, gradients, weights, replicas, between
        ),
        lambda patterns: whole_units(unit_names(model), patterns),
        takes_replicas=True,
    )


def _ddp(model: DistributedDataParallel) -> _Wrapped:
    return _Wrapped(
        lambda gradients, *_: attach_ddp(model, gradients),
        lambda patterns: matching(patterns, parameter_names(model.module).values()),
        "DistributedDataParallel gathers no parameters",
    )


def _wire(
    model: nn.Module,
    wrapped: _Wrapped,
    gradients: Route,
    weights: Route,
    feedback: ErrorFeedback | None,
    lanes: Lanes | None,
) -> Handle:
    ledger, updates = Ledger(), Updates()

    def for_gradients(group: dist.ProcessGroup) -> Collective:
        return make_collective(group, ledger, "gradients", gradients, feedback)

    def for_weights(group: dist.ProcessGroup) -> Collective:
        return make_collective(group, ledger, "weights", weights, updates=updates)

    def for_replicas(group: dist.ProcessGroup) -> Collective:
        return make_collective(group, ledger, "gradients", between_replicas(gradients), feedback)

    kinds = (
        PerGroup("gradients", for_gradients),
        PerGroup("weights", for_weights),
        PerGroup("replicas", for_replicas),
    )
    undo, stateful = [wrapped.attach(*kinds, lanes)], list[Stateful](kinds)
    listeners: list[StepListener] = []
    if feedback is not None:
        listeners.append(feedback)
    if not weights.untouched:
        listeners.append(updates)
        stateful.append(updates)
    undo += [register_step_hook(model, each) for each in listeners]

    def detach() -> None:
        for each in undo:
            each()

    return Handle(ledger, feedback, stateful, detach, lanes, listeners)
