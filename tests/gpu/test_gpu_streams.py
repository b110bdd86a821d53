"""Streams of a GPU: what waits for what, and how often the host does."""

import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as hooks

from shardlab.comm.background import Background
from shardlab.core.device import Accelerator, compute_deterministically, now, seconds_between
from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from tests.engines.engine_cases import make, train
from tests.gpu.devices import Delay, on_devices_long, own_device
from tests.gpu.test_gpu_engines import CASES
from tests.ranks import on_ranks

INT8 = {"codec": "int8:rounding=stochastic", "error_feedback": True}
RACING = {
    **{name: CASES[name] for name in ("manual", "slide", "slide-window", "ddp-int8")},
    "activations": {
        "engine": "ddp",
        "activation_checkpointing": "full",
        "activations": "memory",
    },
}


@pytest.mark.gpu
@on_ranks(1)
def test_page_locked_memory_copies_events_and_futures_are_those_of_cuda() -> None:
    device = own_device("cuda")
    accelerator = Accelerator(device)
    host = torch.arange(1 << 20)
    accelerator.page_lock(host)
    assert host.is_pinned()
    there = torch.empty_like(host, device=device)
    copied = Background("in", device).start(lambda: accelerator.copy(there, host))
    copied.wait()
    assert torch.equal(there.cpu(), host)
    accelerator.page_unlock(host)
    begin = now(device)
    Delay(device)()
    end = now(device)
    torch.cuda.synchronize()
    assert seconds_between(begin, end) > 0
    future = accelerator.future()
    future.set_result(there)
    assert future.wait() is there


@pytest.mark.gpu
@on_ranks(1)
def test_a_lane_begins_after_what_was_launched_and_ends_before_what_waits_for_it() -> None:
    device = own_device("cuda")
    delay, lane = Delay(device), Background("in", device)
    a, b = (torch.zeros(1 << 24, device=device) for _ in range(2))

    def copy() -> None:
        delay()
        b.copy_(a)

    delay()
    a.fill_(3)
    running = lane.start(copy)
    running.wait()
    assert float(b.min()) == 3


@on_devices_long
@pytest.mark.parametrize("name", RACING)
@pytest.mark.fresh_ranks
@on_ranks(1)
def test_late_lanes_and_late_computation_change_no_bit(
    group, name, device, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    compute_deterministically()
    where = own_device(device)
    case, delay = {**RACING[name], "param_dtype": "fp32"}, Delay(where)
    case |= {"activations": "disk"} if device == "cpu" and name == "activations" else {}
    start = Background.start

    def start_late(lane, call, *args, **kwargs):
        def late():
            delay()
            call(*args, **kwargs)
            delay()

        return start(lane, late)

    def pause(module, *_):
        if type(module).__name__ == "GPT2Block":
            delay()

    expected = train(make(group, case, where), group, 5)
    with monkeypatch.context() as patch:
        patch.setattr(Background, "start", start_late)
        late_lanes = train(make(group, case, where), group, 5)
    handles = [
        hooks.register_module_forward_pre_hook(pause),
        hooks.register_module_full_backward_hook(pause),
    ]
    late_computation = train(make(group, case, where), group, 5)
    for handle in handles:
        handle.remove()
    assert torch.equal(late_lanes, expected)
    assert torch.equal(late_computation, expected)


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
    places = [
        f"{Path(wait.filename).name}:{wait.lineno}"
        for wait in waits
        # transformers looks at the attention mask in every forward
        if "synchronizing" in str(wait.message) and "transformers" not in wait.filename
    ]
    assert len(places) <= 1


@pytest.mark.gpu  # on a CPU codecs are not compiled
@on_ranks(1)
def test_no_key_and_no_step_is_a_constant_of_compiled_code(group) -> None:
    case = {"engine": "ddp", "param_dtype": "fp32", "gradients": INT8}
    engine = make(group, case, own_device("cuda"))
    train(engine, group, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(engine, group, 4, first=4)
