"""Collectives of DistributedDataParallel models, through `register_comm_hook`.

DDP calls its hook for every bucket of gradients that is ready, and rebuilds its buckets after the
first backward pass of a process, in the order in which gradients became ready. Residuals, counts
and groups of a codec belong to a message, so messages have a separate layout that does not depend
on the pass, the process or the number of ranks: modules in the reverse of their order in the model,
in messages as large as DDP's buckets. Where gradients become ready in that order, messages equal
the buckets from the second pass on, and nothing is copied.

With `find_unused_parameters` DDP leaves the gradients alone of parameters that no rank uses in a
pass. What a message has sent of their residuals would arrive nowhere, so it goes back to the
residuals; the ranks agree once per pass on which parameters those are: whose gradients are zero on
all of them.

In `join` of DDP a rank that has no more batches calls the hook with zeros, and so sends what its
residuals owe.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.base import Block, Unit
from shardlab.comm.collective import Collective, WarmUp
from shardlab.comm.routes import Collectives
from shardlab.comm.uncompressed import Native
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.names import parameter_names

_TensorFuture = torch.futures.Future[Tensor]


def attach_ddp(model: DistributedDataParallel, collectives: Collectives) -> Callable[[], None]:
    """Use these collectives for the gradients of `model`; return a function that restores DDP's.

    Raises:
        UserError: the model has a communication hook already, sparse gradients, complex
            parameters, no buckets, or skips some.
    """
    if torch_private.reduces_in_python(model):
        raise UserError(
            'ddp: torch._dynamo.config.optimize_ddp is "python_reducer", which makes no buckets of '
            "gradients: set it to True before the model is wrapped"
        )
    collective = collectives.until_alone(collectives.gradients(model.process_group))
    if model.skip_all_reduce_unused_params and not isinstance(collective, Native):
        raise UserError(
            "ddp: skip_all_reduce_unused_params skips gradients that messages contain: "
            "wrap the model without it"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"ddp: {name!r} has sparse gradients: make it with sparse=False")
    for name, parameter in model.module.named_parameters():
        if parameter.is_complex() and not isinstance(collective, Native):
            raise UserError(
                f"ddp: {name} is complex, of which DistributedDataParallel makes buckets of real "
                "numbers: hold its real and its imaginary part, as by torch.view_as_real"
            )
    hook = _BucketHook(collective, model)
    broadcasts = model.broadcast_buffers
    try:
        torch_private.register_comm_hook(model, hook.average)
    except RuntimeError as error:
        raise UserError(
            f"ddp: {' '.join(str(error).split())} The model has one, of an earlier attach or its "
            "own mixed_precision, which torch cannot remove: wrap it anew"
        ) from None
    undo: list[Callable[[], None]] = [hook.disable]
    if isinstance(collective, WarmUp) and broadcasts:
        own_buffers = _OwnBuffers(collective.is_over)
        undo.append(model.register_forward_pre_hook(own_buffers).remove)

    def detach() -> None:
        for each in undo:
            each()
        model.broadcast_buffers = broadcasts

    return detach


class _OwnBuffers:
    """Hook before the forward pass: while they train alone, each replica has its own buffers."""

    def __init__(self, is_over: Callable[[], bool] | None = None) -> None:
        self._is_over = is_over
        """whether gradients are not reduced any more; None in a copy of the model"""

    def __call__(self, model: DistributedDataParallel, _: object) -> None:
        model.broadcast_buffers = self._is_over is None or not self._is_over()

    def __reduce__(self) -> tuple[type["_OwnBuffers"], tuple[()]]:
        # a copied or pickled model is not synchronised, and the condition holds process groups
        return _OwnBuffers, ()


class _UnitMessage(NamedTuple):
    unit: Unit
    parameters: tuple[int, ...]
    """by `id`"""


class _Bucket(NamedTuple):
    """Bucket of which DDP awaits the average."""

    parameters: frozenset[int]
    buffer: Tensor
    averaged: _TensorFuture


class _MessageResult(NamedTuple):
    """Result of a message."""

    unit: Unit
    parts: list[Tensor]
    """one per parameter"""
    used: list[Tensor]
    """bool [] of each: whether this rank has a gradient that is not zero"""


class _BucketHook:
    """Communication hook that averages each message once all its gradients are ready."""

    def __init__(self, collective: Collective, model: DistributedDataParallel) -> None:
        self._collective = collective
        self._native = Native(collective.group, collective.ledger, collective.kind)
        self._names = {key: known[0] for key, known in parameter_names(model.module).items()}
        self._order = {key: index for index, key in enumerate(_backwards(model.module))}
        self._limits = _limits(model)
        self._messages: list[_UnitMessage] = []
        """known from the end of the first pass, which has seen every parameter"""
        self._parameters: list[Tensor] = []
        self._ready: dict[int, Tensor] = {}
        """gradients of the running pass by the `id` of their parameter, as parts of buffers"""
        self._sent: set[int] = set()
        self._waiting: list[_Bucket] = []
        self._returns_unused = model.find_unused_parameters and collective.keeps_residuals
        self._results: list[_MessageResult] = []
        """of the running pass, where what is not applied returns to the residuals"""
        self._accelerator = accelerator_of(next(model.parameters()).device)
        self._stream = self._accelerator.stream() if self._accelerator else None
        # weak, since the reducer holds the hook, and no cycle through it is collected
        self._model = weakref.ref(model)

    def disable(self) -> None:
        """Average as DDP itself does, since torch cannot remove a hook."""
        self._collective = self._native

    def average(self, state: object, bucket: dist.GradBucket) -> _TensorFuture:
        """Start the average of a bucket that is ready; DDP calls it.

        Raises:
            UserError: on all ranks, in `join` of DDP, also after its end: what it asks for would
                not happen.
        """
        self._check_join()
        if isinstance(self._collective, WarmUp) and self._collective.is_over():
            ended: _TensorFuture = (
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

    def _check_join(self) -> None:
        model = self._model()
        if model is None or not torch_private.lets_ranks_end(model):
            return
        if isinstance(self._collective, WarmUp):
            raise UserError(
                "ddp: with sync a rank that ends early in join() leaves the others waiting: "
                "call join(throw_on_early_termination=True), or attach without sync"
            )
        if not torch_private.divides_by_all(model):
            raise UserError(
                "ddp: torch divides by the number of all ranks where a model is attached, whatever "
                "join(divide_by_initial_world_size=False) says: call join() without it"
            )

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

    def _receive(self, bucket: dist.GradBucket) -> _TensorFuture:
        """Note the gradients of a bucket, and send what messages are complete."""
        if bucket.index() == 0:
            # a new pass; the last one may have failed and left gradients behind
            self._ready.clear()
            self._sent.clear()
            self._waiting.clear()
            self._results.clear()
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

    def _order_messages(self) -> list[_UnitMessage]:
        backwards = sorted(self._parameters, key=lambda p: self._order[id(p)])
        buckets = torch_private.assign_buckets(backwards, self._limits)
        messages = [[backwards[index] for index in bucket] for bucket in buckets]
        return [
            _UnitMessage(
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
            if self._returns_unused:
                self._results.append(_MessageResult(unit, parts, [part.any() for part in parts]))
            vector = _joined(parts)
            self._collective.all_reduce(vector, 1 / self._collective.world_size, unit)
            if vector.data_ptr() != parts[0].data_ptr():
                sizes = [part.numel() for part in parts]
                torch._foreach_copy_(parts, list(vector.split(sizes)))
            self._sent.update(parameters)
        if self._returns_unused:
            if len(self._results) < max(1, len(self._messages)):
                return
            self._return_to_residuals()
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            if bucket.parameters <= self._sent:
                bucket.averaged.set_result(bucket.buffer)
            else:
                self._waiting.append(bucket)

    def _return_to_residuals(self) -> None:
        """Return to the residuals what was sent for parameters that no rank uses; set their
        gradients to zero."""
        flags = torch.stack([used for result in self._results for used in result.used])
        flags = flags.to(torch.int32)
        self._collective.any_rank(flags)
        if self._accelerator is None and flags.all():
            return  # on a GPU the host would wait to look
        unused = iter((flags == 0).unbind())
        for unit, parts, _ in self._results:
            lost = []
            for part in parts:
                is_unused = next(unused)
                lost.append(part.where(is_unused, 0.0))
                part.masked_fill_(is_unused, 0.0)
            self._collective.return_to_residuals(torch.cat(lost), unit)


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
