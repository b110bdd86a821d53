"""GPU of each rank, and errors about one that a rank cannot train on, before training."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.gpus import RankGpu, backend_of, gpu_index, take_gpu, why_on_cpu

H200 = RankGpu("GPU-a", "H200", 141 * 10**9, True)


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
        "get_device_properties": lambda n: SimpleNamespace(
            uuid=f"GPU-{n}", name="H200", total_memory=141 * 10**9
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return was_set


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
    assert take_gpu(forked=True) == H200._replace(uuid="GPU-7") and machine == [7]


def test_what_cuda_says_becomes_one_line_with_the_fix(machine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(
        UserError, match=r"^GPU 7: .*\(CUDA error: out of memory\): see what nvidia"
    ):
        take_gpu(forked=True)


def test_gpus_that_cannot_compute_together_are_refused(machine, monkeypatch, capsys):
    smaller = H200._replace(uuid="GPU-b", name="A100", memory_bytes=40 * 10**9)
    assert backend_of([H200, smaller]) == "cpu:gloo,cuda:nccl"
    assert "unequal GPUs (A100, 40 GB; H200, 141 GB): the slowest" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"unequal GPUs .*: some have no bf16"):
        backend_of([H200, smaller._replace(bf16=False)])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match="has no NCCL, which GPUs need: install"):
        backend_of([H200])


def test_a_rank_says_why_it_trains_on_the_cpu(machine):
    assert why_on_cpu(9) == "9 ranks share 8 GPUs: they train on the CPU"


@pytest.mark.parametrize("package", ["stages", "benchmarks"])
def test_ranks_can_be_forked_where_a_library_has_asked_for_a_gpu(monkeypatch, package):
    """The package, which each of its commands imports first, keeps torch from the driver."""

    def asked():
        raise AssertionError("the driver was asked")

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", asked, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    with pytest.raises(AssertionError, match="asked"):
        torch.cuda.is_available()
    importlib.reload(importlib.import_module(package))
    assert torch.cuda.is_available()
