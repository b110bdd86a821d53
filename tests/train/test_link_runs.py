"""Whole runs over an emulated link: measurements, and behaviour when it is cut."""

import os
import signal
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.config.machine import Link
from shardlab.config.schema import Checkpoint
from shardlab.core.files import read_json, read_json_lines
from shardlab.profiling.breakdown import analyse
from shardlab.train.launch import RunFailed
from shardlab.train.loop import Loop
from shardlab.train.run import train_run
from tests.commands import Command
from tests.train.checkpointed import INT4, plan_of, strategy_of
from tests.train.interrupted_runs import Outcome

RATE = "20mbit"
"""at which a step of the tiny model takes long enough to see the link"""


def linked(data, strategy, **train):
    plan = plan_of(data, strategy, steps=4, audit_steps=0, profiled_steps=1, **train)
    return plan, replace(plan, train=plan.train.model_copy(update={"link": Link(rate=RATE)}))


@pytest.mark.long
def test_link_in_namespaces_changes_times_only(permitted, data, tmp_path):
    plan, on_link = linked(data, strategy_of("fsdp2"))
    train_run(plan, tmp_path / "loopback")
    train_run(on_link, tmp_path / "link", telemetry=tmp_path / "scalars")
    assert Outcome.read(tmp_path / "link") == Outcome.read(tmp_path / "loopback")
    slow, fast = (read_json(tmp_path / f / "metrics.json") for f in ("link", "loopback"))
    assert (fast["link"], fast["link_emulation"]) == ("loopback", "none")
    assert fast["interface_bytes"] is None
    assert (slow["link"], slow["link_emulation"]) == (RATE, "namespaces")
    assert slow["bytes_wire"] == fast["bytes_wire"]
    # a message of this model is some frames long: beside 66 bytes of headers each there are those
    # of gloo and the acknowledgements
    assert slow["bytes_wire"] < slow["interface_bytes"] < 1.2 * slow["bytes_wire"]
    events = read_json_lines(tmp_path / "link/events.jsonl")
    for event in events:
        # up to a bucket of tokens passes at once
        assert event["interface_bytes"] - 65536 < event["step_ms"] / 1e3 * 20e6 / 8
        assert 0 < event["collective_ms"] <= event["step_ms"]
    scalars = EventAccumulator(str(tmp_path / "scalars")).Reload()
    assert len(scalars.Scalars("speed/collective_ms")) == len(events)


@pytest.mark.long
def test_in_process_link_changes_times_only(data, tmp_path, monkeypatch, capfd):
    plan, on_link = linked(data, strategy_of("manual", **INT4))
    train_run(plan, tmp_path / "loopback")
    capfd.readouterr()
    monkeypatch.setenv("PATH", "")  # no iproute2
    train_run(on_link, tmp_path / "link")
    said = [line for line in capfd.readouterr().err.splitlines() if RATE in line]
    assert said == [
        f"link of {RATE}: the ranks emulate it in-process "
        "(emulated links need `ip`: install iproute2)"
    ]
    assert Outcome.read(tmp_path / "link") == Outcome.read(tmp_path / "loopback")
    metrics = read_json(tmp_path / "link/metrics.json")
    assert (metrics["link"], metrics["link_emulation"]) == (RATE, "in-process")
    assert metrics["interface_bytes"] is None
    assert metrics["step_ms_p50"] >= metrics["bytes_wire"] * 8 / 20e6 * 1e3
    # in traces the waiting for the link is communication
    assert analyse(tmp_path / "link/trace.json.gz").comm_ms_by_op["shardlab::link"] > 0


def stopped_at_step_5(plan, target, root):
    """A run in which rank 1 stops before its step 6."""
    micro_batches = Loop.micro_batches

    def stopping(loop):
        if loop.step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return micro_batches(loop)

    with patch.object(Loop, "micro_batches", stopping):
        try:
            train_run(plan, target, checkpoints=root)
        except RunFailed as failed:
            print(failed, flush=True)
            sys.exit(1)


@pytest.mark.long
def test_run_that_lost_a_rank_names_it_and_resumes_bit_for_bit(permitted, data, tmp_path):
    plan = plan_of(data, strategy_of("fsdp2"), steps=8, audit_steps=0, timeout_s=3.0)
    train_run(plan, tmp_path / "straight")
    options = {"link": Link(rate="1gbit"), "checkpoint": Checkpoint(every=2)}
    plan = replace(plan, train=plan.train.model_copy(update=options))
    target, root = tmp_path / "run", tmp_path / "checkpoints"
    command = Command(tmp_path / "first", lambda: stopped_at_step_5(plan, target, root))
    assert command.wait() == 1
    assert command.said().count("crash: no report from rank 1: rank 0: ") == 1, command.said()
    command.leaves_nothing()
    assert not (target / "metrics.json").exists()
    train_run(plan, target, checkpoints=root)
    assert Outcome.read(target) == Outcome.read(tmp_path / "straight")
