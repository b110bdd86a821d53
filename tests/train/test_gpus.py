"""Errors about a GPU that a rank cannot train on: one line each, before training."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardlab.core import gpus
from shardlab.core.errors import UserError
from shardlab.core.gpus import RankGpu, backend_of, gpu_index, take_gpu, why_on_cpu
from shardlab.engines import own_gpu as placing
from shardlab.engines.own_gpu import own_gpu

H200 = RankGpu("GPU-a", "H200", 141 * 10**9, True)


@pytest.fixture
def machine(monkeypatch):
    """Local rank 7 of 8, on a machine of 8 GPUs; the list will hold the one that is set."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    was_set = []
    pretend(monkeypatch, init=lambda: None, is_initialized=lambda: True)
    pretend(monkeypatch, device_count=lambda: 8, set_device=was_set.append)
    pretend(monkeypatch, current_device=lambda: 0, mem_get_info=lambda n: (100, 141))
    pretend(monkeypatch, get_arch_list=lambda: ["sm_80", "sm_90", "compute_90"])
    pretend(monkeypatch, is_bf16_supported=lambda including_emulation: True)
    pretend(monkeypatch, get_device_properties=lambda n: properties(n))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return was_set


def pretend(monkeypatch, **functions) -> None:
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)


def properties(number: int, major=9, minor=0):
    return SimpleNamespace(
        uuid=f"GPU-{number}", name="H200", total_memory=141 * 10**9, major=major, minor=minor
    )


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


@pytest.mark.parametrize("chosen", [0, 5])
@pytest.mark.parametrize("asked", ["cuda", "cuda:3"])
def test_a_gpu_is_that_of_the_local_rank_unless_the_program_says_otherwise(
    machine, monkeypatch, chosen, asked
):
    pretend(monkeypatch, current_device=lambda: chosen)
    found = run_alone(lambda group: own_gpu(torch.device(asked), group))
    expected = 3 if asked == "cuda:3" else chosen or 7
    assert found == torch.device("cuda", expected) and machine == [expected]


def test_ranks_that_share_a_gpu_are_refused(machine, monkeypatch):
    monkeypatch.setattr(placing, "gather_values", lambda own, group: [own, "another", own])
    with pytest.raises(UserError, match=r"ranks 0, 2 share GPU .*: start one rank for each GPU"):
        run_alone(lambda group: own_gpu(torch.device("cuda"), group))


@pytest.mark.parametrize(
    ("function", "message", "expected"),
    [
        (
            "init",
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update",
            "GPU 7: the NVIDIA driver is too old for torch .*: install a newer driver, or",
        ),
        (
            "init",
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with",
            "GPU 7: CUDA was in use before the ranks were forked: set PYTORCH_NVML",
        ),
        (
            "mem_get_info",
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors",
            "GPU 7: another process has it alone, .*end that process",
        ),
        ("mem_get_info", "CUDA error: out of memory", "GPU 7: its memory is full: end what uses"),
        ("set_device", "CUDA error: invalid device ordinal\nmore", r"used \(.*ordinal\): see what"),
    ],
)
def test_what_cuda_says_becomes_one_line_with_the_fix(
    machine, monkeypatch, function, message, expected
):
    def fail(*_):
        raise RuntimeError(message)

    pretend(monkeypatch, **{function: fail})
    with pytest.raises(UserError, match=expected) as error:
        take_gpu(forked=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("major", "minor", "runs"),
    [
        (7, 0, False),
        (8, 0, True),
        (8, 9, True),  # binaries run on later minor versions
        (9, 0, True),
        (10, 0, True),  # compiled from compute_90 when it starts
    ],
)
def test_a_gpu_without_code_in_torch_is_too_old(machine, monkeypatch, major, minor, runs):
    pretend(monkeypatch, get_device_properties=lambda n: properties(n, major, minor))
    if runs:
        assert take_gpu(forked=True) == H200._replace(uuid="GPU-7")
    else:
        with pytest.raises(UserError, match=r"GPU 7 \(H200, sm_70\): .* code for sm_80, .* only"):
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


def test_a_rank_says_why_it_trains_on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_INSTALLED", tmp_path)
    pretend(monkeypatch, device_count=lambda: 0)
    assert why_on_cpu(2) is None
    (tmp_path / "0000:0a:00.0").mkdir()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "1 GPUs, but torch" in why_on_cpu(2) and "built without CUDA" in why_on_cpu(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_on_cpu(2) is None
    pretend(monkeypatch, device_count=lambda: 1)
    assert why_on_cpu(2) == "2 ranks share 1 GPUs: they train on the CPU"


@pytest.mark.parametrize("package", ["stages", "benchmarks"])
def test_ranks_can_be_forked_where_a_library_has_asked_for_a_gpu(monkeypatch, package):
    """The package, which each of its commands imports first, keeps torch from the driver."""

    def asked():
        raise AssertionError("the driver was asked")

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", asked, raising=False)
    pretend(monkeypatch, _device_count_nvml=lambda: 2)
    with pytest.raises(AssertionError, match="asked"):
        torch.cuda.is_available()
    importlib.reload(importlib.import_module(package))
    assert torch.cuda.is_available()
