"""Traces that no profiler writes: one line of refusal."""

import gzip
import json
import random
from itertools import cycle

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import analyse
from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.table import render
from tests.trace_factory import WORKER, event, label, step, write_rank

EVENTS = [*step(1, 0, 1000), event("aten::mm", 0, 500), label("gloo:all_reduce", 1, 9, WORKER)]
ABSENT = object()
VALUES = [ABSENT, None, "text", [], {}, [{}], True, -1, -1e3, 1e308, 10**400]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json.gz"
    merge_traces([write_rank(tmp_path / "0.json", EVENTS)], path)
    return path


def refusal(path):
    """One line, or nothing where the change means nothing."""
    refusal_of(of_any, path)
    return refusal_of(analyse, path)


def of_any(path):
    assert all(line.isprintable() for line in render(break_down([path])))


def refusal_of(read, path):
    try:
        read(path)
    except UserError as error:
        message = str(error).replace(str(path), "trace")
        assert "\n" not in message and len(message) <= 300
        return message
    return None


def changed(values, key, value):
    copy = json.loads(json.dumps(values))
    copy.pop(key) if value is ABSENT else copy.__setitem__(key, value)
    return copy


def named(value):
    return "absent" if value is ABSENT else repr(value)[:20]


@pytest.mark.parametrize(
    ("value", "layout"), list(zip(VALUES, cycle([None, 1]), strict=False)), ids=named
)
def test_any_value_of_a_trace_may_be_wrong(tmp_path, trace, value, layout):
    whole = json.loads(gzip.decompress(trace.read_bytes()))
    said = {}
    for key in whole:
        said[key] = write(tmp_path / "x.json", changed(whole, key, value), layout)
    for place, each in enumerate(whole["traceEvents"]):
        for key in each:
            events = [*whole["traceEvents"]]
            events[place] = changed(each, key, value)
            said[place, key] = write(tmp_path / "x.json", {**whole, "traceEvents": events}, layout)
    assert said["traceEvents"] is not None
    if not isinstance(value, bool):
        timed = [p for p, each in enumerate(whole["traceEvents"]) if each["ph"] == "X"]
        assert all(said[place, "dur"] is not None for place in timed)


def write(path, trace, layout):
    path.write_text(json.dumps(trace, indent=layout))
    return refusal(path)


def test_every_torn_and_flipped_trace_is_one_line(trace):
    whole, chance = trace.read_bytes(), random.Random(0)
    for _ in range(300):
        torn = bytearray(whole)
        if chance.random() < 0.3:
            del torn[chance.randrange(len(torn)) :]
        else:
            torn[chance.randrange(10, len(torn))] ^= 1 << chance.randrange(8)
        trace.write_bytes(torn)
        assert refusal(trace) is not None
