"""Collectives of DistributedDataParallel models, through `register_comm_hook`.

DDP calls its hook for every bucket of gradients that is ready, and rebuilds its buckets after the
first backward pass of a process, in the order in which gradients became ready. Residuals, counts
and groups of a codec belong to a message, so messages have a separate layout that does not depend
on the pass, the process or the number of ranks: modules in the reverse of their order in the model,
in messages as large as DDP's buckets. Where gradients become ready in that order, messages equal
the buckets from the second pass on, and nothing is copied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import Collective
from shardlab.comm.native import Native
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.unit_names import parameter_names

_Future = torch.futures.Future[Tensor]


def attach_ddp(
    model: DistributedDataParallel, gradients: Callable[[dist.ProcessGroup], Collective]
) -> Callable[[], None]:
    """Use this collective for the gradients of `model`; return a function that restores DDP's.

    Raises:
        UserError: the model has a communication hook already, or skips buckets.
    """
    collective = gradients(model.process_group)
    if model.skip_all_reduce_unused_params and not collective.elementwise:
        raise UserError(
            "ddp: skip_all_reduce_unused_params skips gradients that messages contain: "
            "wrap the model without it"
        )
    hook = _BucketHook(collective, model)
    try:
        model.register_comm_hook(None, hook.average)
    except RuntimeError as error:
        raise UserError(f"ddp: {' '.join(str(error).split())}") from None
    return hook.disable


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
        self._order = {key: place for place, key in enumerate(_backwards(model.module))}
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
        if not self._collective.elementwise:
            with self._overlapped():
                return self._take(bucket)
        # any grouping gives the same sums, so a bucket need not wait for a whole message
        unit, scale = Unit(f"bucket{bucket.index()}"), 1 / self._collective.world_size
        work = self._collective.start_all_reduce(bucket.buffer(), scale, unit)
        return work.get_future().then(_first)

    @contextmanager
    def _overlapped(self) -> Iterator[None]:
        """On a GPU, launch on a separate stream, after all that the computation has launched."""
        if self._accelerator is None or self._stream is None:
            yield
            return
        launched = self._accelerator.current_stream().record()
        with self._stream.current():
            self._stream.wait(launched)
            yield

    def _take(self, bucket: dist.GradBucket) -> _Future:
        """Note the gradients of a bucket, and send what messages are complete."""
        if bucket.index() == 0:
            # a new pass; the last one may have failed and left gradients behind
            self._ready.clear()
            self._sent.clear()
            self._waiting.clear()
        buffer, given = bucket.buffer(), bucket.parameters()
        parts = buffer.split([parameter.numel() for parameter in given])
        self._ready |= {id(p): part for p, part in zip(given, parts, strict=True)}
        averaged = self._accelerator.future() if self._accelerator else torch.futures.Future()
        self._waiting.append(_Bucket(frozenset(map(id, given)), buffer, averaged))
        if not self._messages:
            self._parameters += given
            if bucket.is_last():
                self._messages = self._lay_out()
        self._send()
        return averaged

    def _lay_out(self) -> list[_Message]:
        backwards = sorted(self._parameters, key=lambda p: self._order[id(p)])
        # private: DDP's own rule, which separates dtypes and devices
        places, _ = dist._compute_bucket_assignment_by_size(
            backwards, self._limits, [False] * len(backwards)
        )
        chosen = [[backwards[place] for place in each] for each in places]
        return [
            _Message(Unit(f"bucket{index}", _blocks(each, self._names)), tuple(map(id, each)))
            for index, each in enumerate(chosen)
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


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """Return the reduced buffer; raise the error of the all-reduce."""
    return done.value()[0]


def _limits(model: DistributedDataParallel) -> list[int]:
    """Return DDP's limits in bytes of the first bucket and of later ones."""
    if model.bucket_bytes_cap_list:
        return list(model.bucket_bytes_cap_list)
    first = [dist._DEFAULT_FIRST_BUCKET_BYTES] if model.bucket_bytes_cap_default else []
    return [*first, model.bucket_bytes_cap]


def _backwards(model: nn.Module) -> list[int]:
    """Return the parameters by `id` in the order of their gradients, if modules run in their order.

    Autograd accumulates the bias of a matrix product before its matrix, but other parameters of a
    module as they are listed.
    """
    seen: set[int] = set()
    modules = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        modules.append(own[::-1] if any(p.dim() == 2 for p in own) else own)
    return [id(p) for own in reversed(modules) for p in own]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one vector, without a copy if they are adjacent in one buffer."""
    first, *_ = parts
    place = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != place:
            return torch.cat(list(parts))
        place += part.nbytes
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def _blocks(parameters: Sequence[Tensor], names: dict[int, str]) -> tuple[Block, ...]:
    return tuple(
        Block(names[id(p)], rows, p.numel() // rows)
        for p in parameters
        for rows in [p.shape[0] if p.dim() else 1]
    )
