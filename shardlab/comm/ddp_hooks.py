"""Puts collectives into DistributedDataParallel models through `register_comm_hook`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective, Native
from shardlab.core.errors import UserError


def attach_ddp(
    model: DistributedDataParallel, gradients: Callable[[dist.ProcessGroup], Collective]
) -> Callable[[], None]:
    """Gives every bucket of `model` our collective; returns a function that takes it out.

    Raises:
        UserError: the model has a communication hook already.
    """
    group = model.process_group
    collective = gradients(group)
    hook = _BucketHook(collective, Native(group, collective.ledger, collective.kind))
    try:
        model.register_comm_hook(None, hook.average)
    except RuntimeError as error:
        raise UserError(f"ddp: {' '.join(str(error).split())}") from None
    return hook.disable


class _BucketHook:
    """Averages one bucket of gradients.

    DDP lays its buckets out anew after the first backward pass, in the order in which gradients
    became ready. Residuals belong to a layout, so the first pass travels uncompressed.
    """

    def __init__(self, collective: Collective, native: Native) -> None:
        self._collective = collective
        self._native = native
        self._laid_out = False
        self._enabled = True

    def disable(self) -> None:
        """DDP hooks cannot be taken out: from now on this one does what DDP itself would."""
        self._enabled = False

    def average(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket that is ready."""
        vector = bucket.buffer()
        scale = 1 / self._native.world_size
        collective = self._pick(vector)
        if bucket.is_last():
            self._laid_out = True
        if collective is self._native:
            work = self._native.start_all_reduce(vector.mul_(scale))
            return work.get_future().then(lambda future: future.value()[0])
        collective.all_reduce(vector, scale, Unit(f"bucket{bucket.index()}"))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(vector)
        return done

    def _pick(self, vector: Tensor) -> Collective:
        if not self._enabled or isinstance(self._collective, Native):
            return self._native
        reason = None
        if not self._laid_out:
            reason = "first pass, before the buckets are laid out"
        elif vector.dtype != torch.float32:
            reason = f"{vector.dtype}"
        if reason is None:
            return self._collective
        self._native.account.uncompressed[reason] += 1
        return self._native
