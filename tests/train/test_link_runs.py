"""Whole runs over an emulated link: measurements, and behaviour when it is cut."""

from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardlab.core.files import read_json, read_json_lines
from shardlab.core.link import Link
from shardlab.profiling.breakdown import analyse
from shardlab.train.run import train_run
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
