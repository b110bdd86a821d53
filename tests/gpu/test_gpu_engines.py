"""Engines, activations and whole runs on a GPU; the same tests on the CPU run without one."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardlab.core.device import compute_deterministically
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.engines.state_files import in_host_memory
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from tests.engines.engine_cases import LOSSY, STRATEGIES, losses_of, make, train
from tests.gpu.devices import on_devices, on_devices_long, own_device
from tests.measured_run import measure
from tests.pipeline.workspace import ROOT
from tests.ranks import on_ranks, run_ranks

BF16 = {
    "ddp-bf16": {"engine": "ddp", "gradients": {"codec": "bf16"}},
    "manual-bf16": {"engine": "manual", "reduce_dtype": "bf16"},
}
CASES = {**STRATEGIES, **LOSSY, **BF16, "fsdp2-offload": {"engine": "fsdp2", "offload": True}}
SLIDING = [name for name in STRATEGIES if name.startswith("slide-")]
NAMES = [*ENGINES, "fsdp2-ahead", "fsdp2-offload", "manual-kept", *SLIDING]
COMPRESSED = ["ddp-int8", "fsdp2-ahead-topk", "manual-topk", "slide-topk"]
ALONE = ["ddp-int8", "ddp-topk", "ddp-powersgd"]
"""with one rank, whose codecs DDP alone calls"""
SHARED = ["ddp", "ddp-int8", "manual", "manual-int8", "slide", "slide-topk", "fsdp2-int8", *BF16]


def strategy_of(name: str, device: str) -> dict[str, object]:
    """Return the case in float32: `auto` is narrower on a GPU. Off-load is refused on a CPU."""
    case = {**CASES[name], "param_dtype": "fp32"}
    return case if device == "cuda" else {k: v for k, v in case.items() if k != "offload"}


def mean_losses(name: str, device: str, world_size: int) -> torch.Tensor:
    def on_rank(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        engine = make(group, strategy_of(name, device), own_device(device))
        return {"losses": train(engine, group, 3)}

    return torch.stack([each["losses"] for each in run_ranks(world_size, on_rank)]).mean(0)


def near(name: str) -> float:
    """Largest distance of losses: a difference in the last bits changes codes and choices."""
    return 1e-3 if name in {*LOSSY, *BF16} else 1e-4


@on_devices
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_computes_the_losses_of_a_cpu(name: str, device: str) -> None:
    expected = losses_of("ddp", 1)
    torch.testing.assert_close(mean_losses(name, device, 1), expected, rtol=1e-4, atol=0)


@on_devices_long
@pytest.mark.parametrize("name", ALONE)
def test_ddp_with_a_codec_computes_what_it_computes_on_a_cpu(name: str, device: str) -> None:
    expected = mean_losses(name, "cpu", 1)
    torch.testing.assert_close(mean_losses(name, device, 1), expected, rtol=near(name), atol=0)


@on_devices_long
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_compute_what_they_compute_on_a_cpu(name: str, device: str) -> None:
    """On one GPU they share it, and gloo sends its tensors."""
    expected = mean_losses(name, "cpu", 2)
    torch.testing.assert_close(mean_losses(name, device, 2), expected, rtol=near(name), atol=0)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", [*NAMES, *COMPRESSED])
def test_two_gpus_compute_what_two_ranks_compute(name: str) -> None:
    expected = mean_losses(name, "cpu", 2)
    torch.testing.assert_close(mean_losses(name, "cuda", 2), expected, rtol=near(name), atol=0)


@pytest.mark.parametrize(
    ("storage", "device"),
    [
        ("disk", "cpu"),
        *(pytest.param(each, "cuda", marks=pytest.mark.gpu) for each in ("disk", "memory")),
    ],
)
@on_ranks(1)
def test_activations_elsewhere_change_no_bit(group, storage, device, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    case = {"engine": "ddp", "activation_checkpointing": "full"}
    there, here = (
        train(make(group, {**case, "activations": each}, own_device(device)), group, 3)
        for each in (storage, "device")
    )
    assert torch.equal(there, here)


@on_devices
@pytest.mark.parametrize("name", [*ENGINES, *COMPRESSED])
@pytest.mark.fresh_ranks
@on_ranks(1)
def test_deterministic_runs_repeat_every_bit(group, name: str, device: str) -> None:
    compute_deterministically()
    first, second = (
        train(make(group, strategy_of(name, device), own_device(device)), group, 3)
        for _ in range(2)
    )
    assert torch.equal(first, second)


@on_devices
@pytest.mark.parametrize("name", ["ddp-int8", "ddp-powersgd"])
@on_ranks(1)
def test_state_that_was_loaded_on_the_host_continues(group, name: str, device: str) -> None:
    engines = [make(group, strategy_of(name, device), own_device(device)) for _ in range(2)]
    for engine in engines:
        train(engine, group, 2)
    state = engines[0].rank_state()
    engines[0].load_rank_state({kind: in_host_memory(named) for kind, named in state.items()})
    losses = [train(engine, group, 2, first=2) for engine in engines]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@on_devices
def test_a_record_says_what_it_was_measured_on(device, data, tmp_path, monkeypatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    short = Train(world_size=1, steps=6, batch_size=2, sequence_length=16, warmup_steps=2)
    settings = short.model_copy(update={"untimed_steps": 2, "deterministic": True})
    plan = RunPlan("gpu", 1, parse_strategy({"engine": "fsdp2"}), settings, Model(preset="tiny"))
    record = measure(replace(plan, data=data), tmp_path)
    assert (record.deterministic, record.tf32) == (True, False)
    assert (record.memory_reserved_bytes is None) == (device == "cpu")
    assert record.collective_ms == 0.0  # of one rank, and known on a GPU, too
    assert record.val_ppl is not None and record.val_ppl < record.untrained_ppl


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="no compute-sanitizer")
def test_kernels_pass_the_sanitizer() -> None:
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m"]
    run = subprocess.run(
        [*command, "tests.gpu.all_codecs", "cuda"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0 and "codecs" in run.stdout, run.stdout + run.stderr
