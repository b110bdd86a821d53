"""The engines that wrap torch launch the operators of a plain training loop, and few more: for each
message the mean and a check, for each step the norm in float64."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.experiment.schema import Model
from shardlab.models.build import build_model
from tests.devices.late_device import late_cpu
from tests.engines.engine_cases import LENGTH, VOCABULARY, batch_of, make
from tests.ranks import on_ranks

Step = Callable[[Tensor], Any]
STEPS = 4
LARGEST, SCALE, COPY = "aten.linalg_vector_norm.default", "aten.mul_.Tensor", "aten.copy_.default"
_PER_STEP = 8
"""norm and loss for one read by the host, where plain torch reads the loss alone"""


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
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def plain_loop(wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """A training step as PyTorch's tutorials write it."""
    model = wrap(build_model(Model(preset="tiny"), VOCABULARY, LENGTH, 0, seed=1).whole())
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
        step(batch_of(number, 0, 0))
    with Launched() as mode:
        step(batch_of(STEPS - 1, 0, 0))
    return mode.counts


@pytest.mark.parametrize("wrap", [ddp, fsdp2], ids=lambda wrap: wrap.__name__)
@on_ranks(2)
def test_a_step_launches_what_plain_torch_launches(
    group: dist.ProcessGroup, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    with late_cpu():
        engine = make(group, {"engine": wrap.__name__})
        ours = launched(lambda batch: engine.step([batch], 1e-3))
    theirs = launched(plain_loop(wrap))
    more, messages = ours - theirs, engine.ledger.accounts["gradients"].collectives // STEPS
    assert messages == (1 if wrap is ddp else 3)
    assert more[LARGEST] + more[SCALE] <= 2 * messages
    assert more.total() - more[COPY] <= 2 * messages + _PER_STEP
    # DDP multiplies into its buckets, where the hook finds copies and multiplies once
    assert more[COPY] <= theirs["aten.mul.out"]
