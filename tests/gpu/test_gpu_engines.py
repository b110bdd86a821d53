"""Engines, activations and whole runs on a GPU; the same tests on the CPU run without one."""

import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardlab.config.engine_traits import ENGINES
from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import parse_strategy
from shardlab.core.device import compute_deterministically
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.engines.state_files import in_host_memory
from shardlab.train.plans import RunPlan
from tests.engines.engine_cases import LOSSY, STRATEGIES, losses_of, make, train
from tests.measured_run import measure
from tests.pipeline.workspace import ROOT
from tests.ranks import on_ranks, run_ranks

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", ON_GPU])
CASES = {**STRATEGIES, **LOSSY, "fsdp2-offload": {"engine": "fsdp2", "offload": True}}
SLIDING = [name for name in STRATEGIES if name.startswith("slide-")]
NAMES = [*ENGINES, "fsdp2-ahead", "fsdp2-offload", "manual-kept", *SLIDING]
COMPRESSED = ["ddp-int8", "fsdp2-ahead-topk", "manual-topk", "slide-topk"]


def strategy_of(name: str, device: str) -> dict[str, object]:
    """Return the case in float32: `auto` is narrower on a GPU. Off-load is refused on a CPU."""
    case = {**CASES[name], "param_dtype": "fp32"}
    return case if device == "cuda" else {k: v for k, v in case.items() if k != "offload"}


def own_device(device: str) -> torch.device:
    """Return the device of a rank; ranks without a GPU of their own share the first."""
    alone = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    if device == "cuda" and alone:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def mean_losses(name: str, device: str, world_size: int) -> torch.Tensor:
    def on_rank(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        engine = make(group, strategy_of(name, device), own_device(device))
        return {"losses": train(engine, group, 3)}

    return torch.stack([each["losses"] for each in run_ranks(world_size, on_rank)]).mean(0)


@on_devices
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_computes_the_losses_of_a_cpu(name: str, device: str) -> None:
    expected = losses_of("ddp", 1)
    torch.testing.assert_close(mean_losses(name, device, 1), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("ddp-int8", "cpu"),
        # on one GPU these ranks share it, and gloo sends its tensors
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("ddp", "ddp-int8")),
        *(
            pytest.param(name, "cuda", marks=pytest.mark.gpu(count=2))
            for name in [*NAMES, *COMPRESSED]
        ),
    ],
)
def test_two_ranks_compute_what_they_compute_on_a_cpu(name: str, device: str) -> None:
    expected = mean_losses(name, "cpu", 2)
    # a difference in the last bits changes what top-k sends
    near = 1e-2 if name in COMPRESSED else 1e-4
    torch.testing.assert_close(mean_losses(name, device, 2), expected, rtol=near, atol=0)


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "manual", "ddp-int8"])
@pytest.mark.fresh_ranks
@on_ranks(1)
def test_a_step_makes_the_host_wait_once(group, name: str) -> None:
    engine = make(group, CASES[name], own_device("cuda"))
    train(engine, group, 2)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        train(engine, group, 1, first=2)
    ours = [
        each
        for each in waits
        # transformers looks at the attention mask in every forward
        if "synchronizing" in str(each.message) and "transformers" not in each.filename
    ]
    assert len(ours) <= 1


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
