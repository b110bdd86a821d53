"""attach in a script of a user: two ranks, which share a GPU where there is one."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.wrapped_models import network
from tests.gpu.devices import on_devices_long, own_device
from tests.ranks import run_ranks

FEEDBACK = {"error_feedback": True, "minimum_size": 0}
GRADIENTS = {
    codec: {"gradients": {"codec": codec, **FEEDBACK}}
    for codec in ("int8", "topk:density=0.1", "int8-shared")
} | {"bf16": {"gradients": {"codec": "bf16", "minimum_size": 0}}}
SYNC = {
    "plain": {},
    "int8": {"codec": "int8", "error_feedback": True},
    "delayed": {"codec": "int8", "delay": 1, "fragments": 2},
    "host": {"state": "host"},
}
SETTINGS = {
    **GRADIENTS,
    **{f"sync-{name}": {"sync": {"every": 2, **options}} for name, options in SYNC.items()},
}


def parameters_after(name: str, device: str) -> torch.Tensor:
    """Parameters of rank 0 after six steps, of which ranks see different samples."""

    def on_rank(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        where = own_device(device)
        model = DistributedDataParallel(network().to(where))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = shardlab.attach(model, **SETTINGS[name], optimizer=optimizer)
        for step in range(6):
            drawn = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
            model(torch.randn(16, 40, generator=drawn).to(where)).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.synchronize()
        state = handle.state_dict()
        handle.load_state_dict(state)
        handle.detach()
        return {"parameters": torch.cat([p.detach().cpu().flatten() for p in model.parameters()])}

    return run_ranks(2, on_rank)[0]["parameters"]


@on_devices_long
@pytest.mark.parametrize("name", SETTINGS)
def test_a_script_trains_as_on_a_cpu(name: str, device: str) -> None:
    expected = parameters_after(name, "cpu")
    error = (parameters_after(name, device) - expected).norm() / expected.norm()
    assert error < 1e-3
