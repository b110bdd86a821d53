"""Collectives of DistributedDataParallel and FSDP1 models, through `register_comm_hook`.

DDP calls its hook for every bucket of gradients that is ready, and rebuilds its buckets after the
first backward pass of a process, in the order in which gradients became ready. Residuals, counts
and groups of a codec belong to a message, so messages have a separate layout that does not depend
on the pass, the process or the number of ranks: modules in the reverse of their order in the model,
in messages as large as DDP's buckets. Where gradients become ready in that order, messages equal
the buckets from the second pass on, and nothing is copied.

FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`) calls `hook(state, gradient, shard)` with
the padded flat gradient of one unit and the shard to fill, or `hook(state, gradient)` without
sharding (NO_SHARD); the hook averages. The arguments do not name the unit, but each unit keeps the
state that is passed to its hook, which is replaced after registration by one of the unit (torch
2.13, `torch/distributed/fsdp/_runtime_utils.py`, `_reduce_grad`). There is no hook for parameters:
the method of a unit's handle that gathers them is replaced (`_flat_param.py`,
`_all_gather_flat_param`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.base import Block, Unit
from shardlab.comm.collective import REPLICAS, Collective, MakeCollective, WarmUp
from shardlab.comm.uncompressed import Native
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.names import parameter_names, plain

_Future = torch.futures.Future[Tensor]


def attach_ddp(model: DistributedDataParallel, gradients: MakeCollective) -> Callable[[], None]:
    """Use this collective for the gradients of `model`; return a function that restores DDP's.

    Raises:
        UserError: the model has a communication hook already, sparse gradients, or skips buckets.
    """
    collective = gradients(model.process_group)
    if model.skip_all_reduce_unused_params and not isinstance(collective, Native):
        raise UserError(
            "ddp: skip_all_reduce_unused_params skips gradients that messages contain: "
            "wrap the model without it"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"ddp: {name!r} has sparse gradients: make it with sparse=False")
    hook = _BucketHook(collective, model)
    broadcasts = model.broadcast_buffers
    try:
        model.register_comm_hook(None, hook.average)
    except RuntimeError as error:
        raise UserError(
            f"ddp: {' '.join(str(error).split())} The model has one, of an earlier attach or its "
            "own mixed_precision, which torch cannot remove: wrap it anew"
        ) from None
    undo: list[Callable[[], None]] = [hook.disable]
    if isinstance(collective, WarmUp):
        is_over = collective.is_over

        def before_forward(*_: object) -> None:
            # each replica has its own between exchanges, which average them
            model.broadcast_buffers = broadcasts and not is_over()

        undo.append(model.register_forward_pre_hook(before_forward).remove)

    def detach() -> None:
        for each in undo:
            each()
        model.broadcast_buffers = broadcasts

    return detach


class _Message(NamedTuple):
    unit: Unit
    parameters: tuple[int, ...]
    """by `id`"""


class _Bucket(NamedTuple):
    """Bucket of which DDP awaits the average."""

    parameters: frozenset[int]
    buffer: Tensor
    averaged: _Future


class _BucketHook:
    """Communication hook that averages each message once all its gradients are ready."""

    def __init__(self, collective: Collective, model: DistributedDataParallel) -> None:
        self._collective = collective
        self._native = Native(collective.group, collective.ledger, collective.kind)
        self._names = {key: known[0] for key, known in parameter_names(model.module).items()}
        self._order = {key: index for index, key in enumerate(_backwards(model.module))}
        self._limits = _limits(model)
        self._messages: list[_Message] = []
        """known from the end of the first pass, which has seen every parameter"""
        self._parameters: list[Tensor] = []
        self._ready: dict[int, Tensor] = {}
        """gradients of the running pass by the `id` of their parameter, as parts of buffers"""
        self._sent: set[int] = set()
        self._waiting: list[_Bucket] = []
        self._accelerator = accelerator_of(next(model.parameters()).device)
        self._stream = self._accelerator.stream() if self._accelerator else None

    def disable(self) -> None:
        """Average as DDP itself does, since torch cannot remove a hook."""
        self._collective = self._native

    def average(self, state: object, bucket: dist.GradBucket) -> _Future:
        """Start the average of a bucket that is ready; DDP calls it."""
        if isinstance(self._collective, WarmUp) and self._collective.is_over():
            ended: _Future = (
                self._accelerator.future() if self._accelerator else (torch.futures.Future())
            )
            ended.set_result(bucket.buffer())
            return ended
        if not isinstance(self._collective, Native):
            with self._overlapped():
                return self._receive(bucket)
        # any grouping gives the same sums, so a bucket need not wait for a whole message
        unit, scale = Unit(f"bucket{bucket.index()}"), 1 / self._collective.world_size
        return self._collective.start_all_reduce(bucket.buffer(), scale, unit)

    @contextmanager
    def _overlapped(self) -> Iterator[None]:
        """On a GPU, launch on a separate stream, after all that the computation has launched."""
        if self._accelerator is None or self._stream is None:
            yield
            return
        launched = self._accelerator.current_stream().record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            yield

    def _receive(self, bucket: dist.GradBucket) -> _Future:
        """Note the gradients of a bucket, and send what messages are complete."""
        if bucket.index() == 0:
            # a new pass; the last one may have failed and left gradients behind
            self._ready.clear()
            self._sent.clear()
            self._waiting.clear()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        parts = buffer.split([parameter.numel() for parameter in parameters])
        self._ready |= {id(p): part for p, part in zip(parameters, parts, strict=True)}
        averaged = self._accelerator.future() if self._accelerator else torch.futures.Future()
        self._waiting.append(_Bucket(frozenset(map(id, parameters)), buffer, averaged))
        if not self._messages:
            self._parameters += parameters
            if bucket.is_last():
                self._messages = self._order_messages()
        self._send()
        return averaged

    def _order_messages(self) -> list[_Message]:
        backwards = sorted(self._parameters, key=lambda p: self._order[id(p)])
        buckets = torch_private.assign_buckets(backwards, self._limits)
        messages = [[backwards[index] for index in bucket] for bucket in buckets]
        return [
            _Message(
                Unit(f"bucket{number}", _parameter_blocks(parameters, self._names)),
                tuple(map(id, parameters)),
            )
            for number, parameters in enumerate(messages)
        ]

    def _send(self) -> None:
        """Send every complete message, in the order of the layout, which all ranks share."""
        for unit, parameters in self._messages:
            if parameters[0] in self._sent or not all(key in self._ready for key in parameters):
                continue
            parts = [self._ready.pop(key) for key in parameters]
            vector = _joined(parts)
            self._collective.all_reduce(vector, 1 / self._collective.world_size, unit)
            if vector.data_ptr() != parts[0].data_ptr():
                sizes = [part.numel() for part in parts]
                torch._foreach_copy_(parts, list(vector.split(sizes)))
            self._sent.update(parameters)
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            if bucket.parameters <= self._sent:
                bucket.averaged.set_result(bucket.buffer)
            else:
                self._waiting.append(bucket)


def _limits(model: DistributedDataParallel) -> list[int]:
    """Return DDP's limits in bytes of the first bucket and of later ones."""
    if model.bucket_bytes_cap_list:
        return list(model.bucket_bytes_cap_list)
    first = [torch_private.FIRST_BUCKET_BYTES] if model.bucket_bytes_cap_default else []
    return [*first, model.bucket_bytes_cap]


def _backwards(model: nn.Module) -> list[int]:
    """Return the parameters by `id` in the order of their gradients, if modules run in their order.

    Autograd accumulates the bias of a matrix product before its matrix, but other parameters of a
    module as they are listed.
    """
    seen: set[int] = set()
    modules = []
    for module in model.modules():
        direct = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, direct))
        modules.append(direct[::-1] if any(p.dim() == 2 for p in direct) else direct)
    return [id(p) for parameters in reversed(modules) for p in parameters]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one vector, without a copy if they are adjacent in one buffer."""
    first, *_ = parts
    address = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != address:
            return torch.cat(list(parts))
        address += part.nbytes
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def _parameter_blocks(parameters: Sequence[Tensor], names: dict[int, str]) -> tuple[Block, ...]:
    return tuple(
        Block(names[id(p)], rows, p.numel() // max(rows, 1))
        for p in parameters
        for rows in [p.shape[0] if p.dim() else 1]
    )


class _State(NamedTuple):
    """State that torch passes to the hook of a unit."""

    collective: Collective
    unit: Unit
    between: Collective | None
    """over the replicas"""
    gathers: Collective | None
    """of its parameters, where they are sharded"""


def attach_fsdp1(
    model: nn.Module,
    gradients: MakeCollective,
    weights: MakeCollective,
    replicas: MakeCollective,
    between: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Use these collectives for every unit of `model`; return a function that restores torch's.

    Args:
        replicas: of gradients, between replicas of the model.
        between: the ranks that hold the same shard in other replicas.

    Raises:
        UserError: hybrid sharding, or a hook is registered already.
    """
    named = units(model)
    for name, module in named.items():
        if module.sharding_strategy in torch_private.HYBRID:
            raise UserError(
                f"fsdp1: torch takes no communication hook for {module.sharding_strategy.name} "
                f"({name}): use fully_shard with a two-dimensional mesh"
            )
    # torch registers a hook from a root in all its units
    inner = {m for unit in named.values() for m in unit.modules() if m is not unit}
    for root in (unit for unit in named.values() if unit not in inner):
        try:
            root.register_comm_hook(None, _average)
        except AssertionError as error:
            raise UserError(f"fsdp1: {error}: call detach() of an earlier handle first") from None
    average = None if between is None else replicas(between)
    for name, module in named.items():
        assert module.process_group is not None, "set unless the strategy is hybrid"
        unit = Unit(name, _blocks(name, module))
        handle, gathers = torch_private.handle_of(module), None
        if handle is not None and handle.uses_sharded_strategy:
            _clear_padding(handle)
            gathers = weights(module.process_group)
            torch_private.set_gather(handle, partial(_gather, handle, gathers, unit))
        state = _State(gradients(module.process_group), unit, average, gathers)
        torch_private.set_hook_state(module, state)

    def detach() -> None:
        for module in named.values():
            torch_private.restore_fsdp1(module)

    return detach


def unit_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each unit."""
    names = {}
    for name, unit in units(model).items():
        prefix = "" if name == "root" else f"{name}."
        flat = torch_private.flat_parameter(unit)
        inside = () if flat is None else torch_private.flat_names(flat)
        names[name] = [prefix + plain(fqn) for fqn in inside]
    return names


def units(model: nn.Module) -> dict[str, FullyShardedDataParallel]:
    """Return the units by name."""
    return {
        plain(name) or "root": module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }


def _blocks(name: str, unit: FullyShardedDataParallel) -> tuple[Block, ...]:
    """Return one block, without the padding at its end, which depends on the number of ranks."""
    flat = torch_private.flat_parameter(unit)
    if flat is None:
        return ()
    last, is_padding = torch_private.flat_parts(flat)[-1]
    padding = last if is_padding else 0
    return (Block(name, torch_private.flat_numel(flat) - padding, 1),)


def _average(state: _State, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Average a flat gradient; FSDP1 calls it."""
    collective, unit, between, gathers = state
    if gathers is not None:  # one that stays gathered after forward is not gathered in backward
        gathers.note_pass(unit, True)
    scale = 1 / collective.world_size
    if shard is not None:
        collective.reduce_scatter(shard, gradient, scale, unit)
    else:
        # also a group of one, whose strategy torch makes NO_SHARD
        shard = gradient[: unit.blocks[0].rows]
        if collective.world_size > 1:
            collective.all_reduce(shard, scale, unit)
    if between is not None:
        part = Unit(unit.name + REPLICAS, (Block(unit.name, shard.numel(), 1),))
        between.all_reduce(shard, 1 / between.world_size, part)


def _clear_padding(handle: torch_private.FlatParamHandle) -> None:
    """Set padding to 0: torch's 42 would widen the range of a group of quantized parameters."""
    flat = handle.flat_param
    shard = flat.data
    first, end = handle.rank * shard.numel(), 0
    for numel, padding in torch_private.flat_parts(flat):
        start, end = end, end + numel
        if padding:
            shard[max(start - first, 0) : max(end - first, 0)].zero_()
    shard[max(end - first, 0) :].zero_()


def _gather(
    handle: torch_private.FlatParamHandle, collective: Collective, unit: Unit, whole: Tensor
) -> Tensor:
    """Gather the parameters of a unit into `whole`; FSDP1 calls it."""
    if torch_private.is_summoned(handle):
        # exact, since these parameters are saved or read by the user
        return torch_private.gather_by_torch(handle, whole)
    shard = handle.flat_param.data
    collective.note_pass(unit, torch_private.in_backward())
    collective.all_gather(whole, shard, unit)
    accelerator = accelerator_of(shard.device)
    if torch_private.is_offloaded(handle) and accelerator is not None:
        # FSDP1 has copied it to the device on another stream, and frees it when this returns
        shard.record_stream(accelerator.current_stream())
    return whole
