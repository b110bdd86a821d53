"""`attach`: compressed communication of an FSDP2, FSDP1 or DDP model in one call."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import StrictBool
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlab.codecs.registry import make_codec
from shardlab.comm.background import Lanes
from shardlab.comm.codec_collective import Route
from shardlab.comm.exchanges import Exchanges
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.fsdp2_hooks import replica_group
from shardlab.comm.handle import Handle
from shardlab.comm.ledger import Ledger
from shardlab.comm.object_collectives import release, subgroup
from shardlab.comm.optimizer_steps import count_steps, on_update, unwrapped
from shardlab.comm.rare_sync import RareSync
from shardlab.comm.routes import (
    Attachable,
    Collectives,
    gradient_route,
    make_collective,
    weight_route,
)
from shardlab.comm.uncompressed import Native
from shardlab.comm.wrappers import (
    attach_wrapper,
    check_wrapper,
    excluded_blocks,
    find_wrapper,
    message_names,
)
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError, nearest, warn_script, without_frames
from shardlab.core.types import Seed
from shardlab.kernels import native
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.compression import Compression, Gradients, WeightCompression, Weights
from shardlab.strategy.document import Strategy
from shardlab.strategy.sync import MINIMUM_SIZE, Sync

_D = TypeVar("_D", bound=Document)


@without_frames
def attach(
    model: nn.Module,
    gradients: str | Mapping[str, Any] | CodecSpec | Compression = "none",
    weights: str | Mapping[str, Any] | CodecSpec | WeightCompression | None = "none",
    sync: Mapping[str, Any] | Sync | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    replicas: dist.ProcessGroup | None = None,
    overlap: bool = False,
    seed: int = 0,
    **unknown: Any,
) -> Handle:
    """Compress the gradients (and gathered parameters) of `model`, and count every byte.

    All ranks call with the same arguments, once, after the last `fully_shard` and before the first
    forward pass. The ledger lists what was sent uncompressed, and why.

    Args:
        model: wrapped by `fully_shard`, FullyShardedDataParallel or DistributedDataParallel, or a
            module around such a model.
        gradients: as in params.yaml, a codec with options (`"int8:group=64"`) or a mapping
            (`{"codec": "int8", "error_feedback": True}`); or a `shardlab.Compression`.
        weights: likewise for the parameters that are gathered; or a `shardlab.WeightCompression`.
        sync: synchronise the parameters of replicas every few steps, in place of the gradients of
            every step (`shardlab.comm.rare_sync`): a mapping (`{"every": 32, "codec": "int4"}`) or
            a `shardlab.Sync`.
        optimizer: with `sync`, one or several that step once per iteration; without it call
            `handle.step()` at the end of each.
        replicas: with FullyShardedDataParallel, and with `sync` and `fully_shard` over one
            dimension, the ranks that hold this shard of other replicas.
        overlap: overlap communication with computation on CPUs, for `fully_shard`, as far as the
            model prefetches. Backward ends when all gradients are reduced.
        seed: of random codecs; the same on all ranks.
        unknown: refused, with the names that are right.

    Raises:
        UserError: in one line: options that do not fit each other or the model, or no wrapper.
    """
    for name in unknown:
        raise UserError(f"attach: unknown argument {name!r}; {_argument(name)}")
    return _attach(
        model,
        _document(Compression, Gradients, gradients, "gradients"),
        _document(WeightCompression, Weights, weights or "none", "weights"),
        None if sync is None else _document(Sync, Sync, sync, "sync"),
        unwrapped(optimizer),
        replicas,
        validate(StrictBool, overlap, "attach: overlap"),
        validate(Seed, seed, "attach: seed"),
    )


_ELSEWHERE = {"comm_hook": "gradients", "inner_optimizer": "optimizer"}
"""arguments by the names that torch and torchft give them"""


def _argument(name: str) -> str:
    """Return a sentence that names the argument that an unknown one may stand for."""
    if name in Sync.elsewhere:
        return f"did you mean {Sync.elsewhere[name]!r} in the mapping sync?"
    if name in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[name]!r}?"
    return nearest(name, [key for key in signature(attach).parameters if key != "unknown"])


def _document(kind: type[_D], annotation: Any, value: object, name: str) -> _D:
    """Return the document of an argument; one that is a document already has been validated."""
    if isinstance(value, kind):
        return value
    plain = dict(value) if isinstance(value, Mapping) else value
    document: _D = validate(annotation, plain, f"attach: {name}")
    return document


def _attach(
    model: nn.Module,
    gradients: Compression,
    weights: WeightCompression,
    sync: Sync | None,
    optimizers: Sequence[Optimizer],
    replicas: dist.ProcessGroup | None,
    overlap: bool,
    seed: int,
) -> Handle:
    wrapper, gathers = find_wrapper(model), weights.codec.name != "none"
    _check_engine(wrapper, gradients, weights, sync)
    check_wrapper(model, wrapper, replicas, sync is not None, overlap)
    overlap = overlap and _can_overlap()
    _warn("gradients", gradients.left_out())
    excluded = excluded_blocks(model, wrapper, gradients.exclude)
    if gathers or sync is not None or not gradients.plain():
        # a source tree builds its kernels now: in the first message other ranks would wait
        native.compiled(next(model.parameters(), torch.empty(0)))
    ledger, lanes = Ledger(gradients.ranks_per_node), Lanes() if overlap else None
    reduction, gathering = gradient_route(gradients, excluded, seed), weight_route(weights, seed)
    undo: list[Callable[[], None]] = []
    """what `detach` calls, the last one first"""
    rare, trains_alone = None, None
    if sync is not None:
        rare = _rare_sync(model, wrapper, sync, ledger, replicas, seed, undo)
        trains_alone = rare.trains_alone
    collectives = Collectives(ledger, reduction, gathering, trains_alone)
    undo.append(collectives.close)
    undo.append(attach_wrapper(model, wrapper, collectives, lanes, replicas))
    if reduction.feedback is not None:
        undo.append(on_update(reduction.feedback.updated, model.parameters))
    if rare is not None:
        undo += [count_steps(model, rare, optimizers), rare.detach]

    def detach() -> None:
        while undo:
            undo.pop()()

    units = message_names(model, wrapper)
    draws = gathering.draws if gathers else None
    one_rank = all(dist.get_world_size(group) == 1 for group in collectives.by_purpose["gradients"])
    sends = not (one_rank and isinstance(wrapper, FSDPModule | FullyShardedDataParallel))
    if sync is not None and not sends and not (gradients.plain() or sync.warmup_steps):
        _warn("gradients", "a replica is one rank, which sends none: give sync the codec")
    return Handle(ledger, reduction.feedback, draws, collectives, units, lanes, detach, sends, rare)


def _check_engine(
    wrapper: nn.Module, gradients: Compression, weights: WeightCompression, sync: Sync | None
) -> None:
    """Refuse what a strategy of the wrapper's engine refuses; engines come with a strategy."""
    compressed: dict[str, Any] = {
        "gradients": gradients,
        "weights": weights.canonical(),
        "sync": sync,
    }
    if isinstance(wrapper, DistributedDataParallel):
        compressed["engine"] = "ddp"
    elif isinstance(wrapper, FullyShardedDataParallel):
        compressed["engine"] = "fsdp1"
    elif sync is not None and isinstance(wrapper, FSDPModule):
        compressed |= {"sharding": "hybrid_shard", "replicas": 2}  # of any number
    elif isinstance(wrapper, Attachable):
        return
    validate(Strategy, compressed, "attach")


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
                "sync would not: freeze it"
            )
        model = wrapper.module
    elif isinstance(wrapper, FSDPModule):
        group = replica_group(model, replicas, settings.warmup_steps)
    else:
        assert isinstance(wrapper, Attachable) and wrapper.replica_group is not None, "replicas"
        group = wrapper.replica_group
    _warn("sync", settings.left_out())
    codec = make_codec(settings.codec)
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


def _warn(name: str, sentence: str | None) -> None:
    """Warn, on the first rank, of what a run may never send."""
    if sentence and dist.get_rank() == 0:
        warn_script(f"attach: {name}: {sentence}")


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
