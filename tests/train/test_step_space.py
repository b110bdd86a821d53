"""A step that does not fit is refused before there is an engine."""

import pytest
import torch

from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.memory import CUBLAS_WORKSPACE, closed_form, host_memory
from shardlab.models.settings import Model, StepSize
from shardlab.models.sizes import sizes_of
from shardlab.strategy.document import parse_strategy
from shardlab.train import step_space as space
from shardlab.train.step_space import free_bytes, refuse_too_large
from tests.ranks import on_ranks

STEP = StepSize(batch_size=2, sequence_length=16)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FSDP2 = parse_strategy({"engine": "fsdp2", "param_dtype": "fp32"})
SLIDE = parse_strategy({"engine": "slide", "param_dtype": "fp32"})
OFFLOADED = parse_strategy({"engine": "fsdp2", "param_dtype": "fp32", "offload": True})


@pytest.mark.parametrize(
    ("strategy", "device"), [(FSDP2, CPU), (SLIDE, CPU), (FSDP2, GPU), (SLIDE, GPU)]
)
@on_ranks(2)
def test_the_limit_is_the_closed_form(group, monkeypatch, strategy, device) -> None:
    model, _ = build_model(Model(preset="tiny"), 300, 16, 0, seed=1)
    given = strategy, sizes_of(model, strategy, STEP, device), 2
    need = sum(closed_form(*given).values())
    need += sum(host_memory(*given).values()) if device == CPU else CUBLAS_WORKSPACE
    free = {CPU: 1 << 60, device: need}
    monkeypatch.setattr(space, "free_bytes", lambda place, sharing: free[place])
    refuse_too_large(model, strategy, STEP, device, group)
    free[device] -= 1
    with pytest.raises(UserError, match=r"needs about .* GB \(.*free: lower train.batch") as error:
        refuse_too_large(model, strategy, STEP, device, group)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", [SLIDE, OFFLOADED])
@on_ranks(2)
def test_the_host_of_a_gpu_has_a_limit_too(group, monkeypatch, strategy) -> None:
    model, _ = build_model(Model(preset="tiny"), 300, 16, 0, seed=1)
    states = host_memory(strategy, sizes_of(model, strategy, STEP, GPU), 2)
    # float32 parameters and two moments, halved
    assert sum(states.values()) >= 12 * sum(p.numel() for p in model.parameters()) // 2
    free = {GPU: 1 << 60, CPU: sum(states.values())}
    monkeypatch.setattr(space, "free_bytes", lambda place, sharing: free[place])
    refuse_too_large(model, strategy, STEP, GPU, group)
    free[CPU] -= 1
    with pytest.raises(UserError, match=r"a rank's part of this machine has .*engine: slide"):
        refuse_too_large(model, strategy, STEP, GPU, group)


def test_ranks_share_the_free_memory_of_the_host(monkeypatch) -> None:
    monkeypatch.setattr(space, "free_memory_bytes", lambda: 100)
    assert free_bytes(CPU, 4) == 25
