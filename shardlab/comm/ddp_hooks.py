"""Puts collectives into DistributedDataParallel models through `register_comm_hook`."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import Collective, Native
from shardlab.comm.names import parameter_names
from shardlab.core.errors import UserError

FIRST_PASS = "first pass, before the buckets are laid out"


def attach_ddp(
    model: DistributedDataParallel, gradients: Callable[[dist.ProcessGroup], Collective]
) -> Callable[[], None]:
    """Gives every bucket of `model` our collective; returns a function that takes it out.

    Raises:
        UserError: the model has a communication hook already.
    """
    group = model.process_group
    collective = gradients(group)
    names = {key: known[0] for key, known in parameter_names(model.module).items()}
    hook = _BucketHook(collective, names)
    try:
        model.register_comm_hook(None, hook.average)
    except RuntimeError as error:
        raise UserError(f"ddp: {' '.join(str(error).split())}") from None
    return hook.disable


class _BucketHook:
    """Averages one bucket of gradients.

    DDP lays its buckets out anew after the first backward pass of a process, in the order in which
    gradients became ready. Residuals belong to a layout, so the first pass travels uncompressed;
    so does the first one after a resume.
    """

    def __init__(self, collective: Collective, names: dict[int, str]) -> None:
        self._collective = collective
        self._native = Native(collective.group, collective.ledger, collective.kind)
        self._names = names
        self._units: dict[int, Unit] = {}
        self._laid_out = False
        self._enabled = True

    def disable(self) -> None:
        """DDP hooks cannot be taken out: from now on this one does what DDP itself would."""
        self._enabled = False

    def average(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket that is ready."""
        vector = bucket.buffer()
        scale = 1 / self._native.world_size
        collective = self._pick()
        if bucket.is_last():
            self._laid_out = True
        if collective is self._native:
            work = self._native.start_all_reduce(vector.mul_(scale))
            return work.get_future().then(lambda future: future.value()[0])
        collective.all_reduce(vector, scale, self._unit(bucket))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(vector)
        return done

    def _pick(self) -> Collective:
        if not self._enabled or isinstance(self._collective, Native):
            return self._native
        if not self._laid_out:
            self._native.account.uncompressed[FIRST_PASS] += 1
            return self._native
        return self._collective

    def _unit(self, bucket: dist.GradBucket) -> Unit:
        index = bucket.index()
        if index not in self._units:
            blocks = _blocks(bucket.parameters(), self._names)
            self._units[index] = Unit(f"bucket{index}", blocks)
        return self._units[index]


def _blocks(parameters: Sequence[Tensor], names: dict[int, str]) -> tuple[Block, ...]:
    return tuple(
        Block(names[id(p)], rows, p.numel() // rows)
        for p in parameters
        for rows in [p.shape[0] if p.dim() else 1]
    )
