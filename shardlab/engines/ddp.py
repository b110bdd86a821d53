"""`ddp`: torch's DistributedDataParallel, the baseline that shards nothing."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardlab.engines.autograd import AutogradEngine
from shardlab.engines.base import EngineSetup
from shardlab.models.dtypes import dtype_of
from shardlab.models.unit_names import plain


class DDPEngine(AutogradEngine):
    """Engine with the whole model on every rank; buckets of gradients are averaged in backward."""

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        setup.fill(model)
        wrapped = DistributedDataParallel(
            model,
            process_group=setup.group,
            bucket_cap_mb=setup.strategy.bucket_mb,
            gradient_as_bucket_view=True,
        )
        super().__init__(wrapped, setup)
        self._wrapped = wrapped
        self._dtype = dtype_of(setup.strategy.param_dtype, setup.device)

    def _accumulating(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def _logits(self, tokens: Tensor) -> Tensor:
        narrow = self._dtype is not torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=narrow):
            return super()._logits(tokens)

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self._wrapped.module.named_parameters()
        return {plain(name): parameter for name, parameter in named}

    def rehearse(self, batch: Tensor) -> None:
        """Run a pass: DDP rebuilds its buckets after the first, and sums depend on the layout."""
        before = self._handle.state_dict()
        self._accumulate(batch, 1)
        self._finish_backward()
        self._optimizer.zero_grad()
        self._handle.load_state_dict(before)
