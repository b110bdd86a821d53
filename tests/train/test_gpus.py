"""GPU of each rank, and errors about one that a rank cannot train on, before training."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.gpus import RankGpu, backend_of, gpu_index, take_gpu, why_on_cpu
from shardlab.engines import own_gpu as own_gpu_module
from shardlab.engines.own_gpu import own_gpu


@pytest.fixture
def machine(monkeypatch):
    """Local rank 7 of 8, on a machine of 8 GPUs; the list will hold the one that is set."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    was_set = []
    tensor = SimpleNamespace(add_=lambda _: SimpleNamespace(item=lambda: 2.0))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: tensor)
    for name, function in {
        "init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "set_device": was_set.append,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation: True,
        "get_device_properties": lambda n: SimpleNamespace(uuid=f"GPU-{n}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return was_set


def run_alone(function):
    """Call a function with a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("visible", "forked", "expected"),
    [
        (8, True, 7),  # all GPUs of the machine
        (8, False, 7),
        (1, False, 0),  # the GPU of this rank alone
        (1, True, None),  # shared by the ranks
        (0, False, None),
    ],
)
def test_rank_takes_the_gpu_of_its_local_rank(machine, visible, forked, expected):
    assert gpu_index(visible, forked=forked) == expected
    assert take_gpu(forked=True) == RankGpu("GPU-7", True) and machine == [7]


@pytest.mark.parametrize(("asked", "chosen"), [("cuda", 0), ("cuda", 5), ("cuda:3", 5)])
def test_a_gpu_is_that_of_the_local_rank_unless_the_program_says_otherwise(
    machine, monkeypatch, asked, chosen
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    device = run_alone(lambda group: own_gpu(torch.device(asked), group))
    expected = 3 if asked == "cuda:3" else chosen or 7
    assert device == torch.device("cuda", expected) and machine == [expected]


def test_ranks_that_share_a_gpu_are_refused(machine, monkeypatch):
    monkeypatch.setattr(own_gpu_module, "gather_values", lambda own, group: [own, "another", own])
    with pytest.raises(UserError, match=r"ranks 0, 2 share GPU .*: start one rank for each GPU"):
        run_alone(lambda group: own_gpu(torch.device("cuda"), group))


def test_what_cuda_says_becomes_one_line_with_the_fix(machine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(
        UserError, match=r"^GPU 7: .*\(CUDA error: out of memory\): see what nvidia"
    ):
        take_gpu(forked=True)


def test_every_rank_with_its_own_gpu_uses_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    one, two = RankGpu("GPU-a", True), RankGpu("GPU-b", True)
    assert backend_of([one, two]) == "cpu:gloo,cuda:nccl"
    assert backend_of([one, one]) == backend_of([one, None]) == "gloo"
    with pytest.raises(UserError, match="unequal GPUs: some have no bf16"):
        backend_of([one, two._replace(bf16=False)])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match="has no NCCL, which GPUs need: install"):
        backend_of([one])


def test_a_rank_says_why_it_trains_on_the_cpu(machine):
    assert why_on_cpu(9) == "9 ranks share 8 GPUs: they train on the CPU"
