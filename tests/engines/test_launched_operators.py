"""The engines that wrap torch launch the operators of a plain training loop: none for a message."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from shardlab.comm import native as native_collective
from shardlab.kernels import native
from shardlab.models.presets import Shape, shape_config
from tests.devices.late_device import late_cpu
from tests.engines.slide.small_engine import LENGTH, VOCABULARY, batch_of, engine_of
from tests.ranks import on_ranks

Step = Callable[[Tensor], Any]
STEPS, BUCKET_MB = 3, 0.05
COPY, PRODUCT = "aten.copy_.default", "aten.mul.out"
MOST = 0.01
"""more operators than plain torch, as a fraction"""


class Launched(TorchDispatchMode):
    """Counts of the operators that this thread launches on a device: views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "aten" and not func.is_view and "empty" not in str(func):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


STRATEGIES = {"ddp": {"engine": "ddp", "bucket_mb": BUCKET_MB}, "fsdp2": {"engine": "fsdp2"}}


def plain_loop(wrap: Callable[[nn.Module], nn.Module], layers: int) -> Step:
    """A training step as PyTorch's tutorials write it."""
    config = shape_config(Shape(layers, 32, 2), VOCABULARY, LENGTH, 0)
    model = wrap(AutoModelForCausalLM.from_config(config))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)

    def step(batch: Tensor) -> float:
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def launched(step: Step) -> Counter[str]:
    for number in range(STEPS - 1):  # the first ones make buckets and moments
        step(batch_of(number, 0))
    with Launched() as mode:
        step(batch_of(STEPS - 1, 0))
    return mode.counts


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("wrap", [ddp, fsdp2], ids=lambda wrap: wrap.__name__)
@on_ranks(2)
def test_a_step_launches_what_plain_torch_launches(
    group: dist.ProcessGroup, wrap: Callable[[nn.Module], nn.Module], layers: int
) -> None:
    """On a device without kernels for CPUs, by a backend that divides, as NCCL does."""
    with (
        late_cpu(),
        patch.object(native, "compiled", lambda values: False),
        patch.object(native_collective, "divides", lambda group, device: True),
    ):
        engine = engine_of(group, STRATEGIES[wrap.__name__], layers=layers)
        ours = launched(lambda batch: engine.step([batch], 1e-3))
    theirs = launched(plain_loop(wrap, layers))
    messages = engine.ledger.accounts["gradients"].collectives / STEPS
    assert messages > (1 if wrap is ddp else layers)
    if wrap is ddp:  # which multiplies into its buckets, where a hook finds copies
        ours[PRODUCT] += ours[COPY] - theirs[COPY]
        ours[COPY] = theirs[COPY]
    more = ours.total() / theirs.total() - 1
    assert more <= MOST, (ours - theirs, theirs - ours)
