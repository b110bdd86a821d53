"""Repetition of a real trace, as in the benchmark of readers."""

import json

import pytest

from benchmarks.traces import repeated
from shardlab.profiling.breakdown import read_steps
from tests.trace_factory import WORKER, event, label, step, threads


def test_repeated_trace_repeats_its_steps(tmp_path):
    events = [*step(0, 10.5, 1000.25), event("aten::mm", 20, 300), label("gloo:send", 100, 350)]
    events += [label("gloo:all_reduce", 400, 700, WORKER)]
    trace = {"schemaVersion": 1, "traceEvents": [*threads(), *events]}
    text = json.dumps(trace, indent=2).replace("\n  ", "\n")[:-2] + ',"traceName": "a"}\n'
    path = tmp_path / "large.json"
    path.write_text("".join(repeated(text, 4.5 * len(text))))
    json.loads(path.read_text())
    first, *others = read_steps(path)
    assert len(others) >= 4
    for other in others:
        assert other.step_ms == pytest.approx(first.step_ms)
        assert other.comm_ms_by_op == pytest.approx(first.comm_ms_by_op)
        assert other.exposed_comm_ms == pytest.approx(first.exposed_comm_ms)
    assert sorted(other.step for other in others) == [other.step for other in others]
