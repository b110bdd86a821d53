"""Whatever the layout of a trace: the events that json.load sees, or one line of refusal."""

import gzip
import json
import random

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.trace_file import load_trace, write_trace
from tests.trace_factory import WORKER, event, label, step, write_rank

NAMES = ["aten::mm", 'a "quoted" }, {\n  },\n  { name', "\\", "ü", "}"]
HEADER = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "pg_config": [{"ranks": [0, 1]}]}}
LAYOUTS = {
    "Kineto": lambda trace: kineto(trace),
    "indented": lambda trace: json.dumps(trace, indent=1),
    "one line": lambda trace: json.dumps(trace),
    "compact": lambda trace: json.dumps(trace, separators=(",", ":")),
}


def kineto(trace):
    """As torch 2.13 writes it (libkineto, output_json.cpp)."""
    events = ",".join(
        f"\n  {{\n    {json.dumps(e)[1:-1]}\n    \n  }}" for e in trace["traceEvents"]
    )
    head = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})
    return f'{head[:-1]},\n    "traceEvents": [\n    {events}\n  ],"traceName": "/tmp/a {{" }}\n'


def made(count):
    events = [event(NAMES[i % len(NAMES)], 10.125 * i, 10.125 * i + 3) for i in range(count)]
    return {**HEADER, "traceEvents": events}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_every_layout_is_read_like_json(layout, count, tmp_path):
    text = LAYOUTS[layout](made(count))
    plain, compressed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(text)
    compressed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, compressed):
        header, events = load_trace(path)
        assert events == json.loads(text)["traceEvents"]
        assert header["distributedInfo"] == HEADER["distributedInfo"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_trace_is_refused(layout, tmp_path):
    whole = LAYOUTS[layout](made(400)).rstrip()
    path = tmp_path / "trace.json"
    for length in (0, 30, len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:length])
        with pytest.raises(UserError, match="not a whole trace") as refusal:
            load_trace(path)
        assert "\n" not in str(refusal.value)
    path.unlink()
    with pytest.raises(UserError, match="no such trace"):
        load_trace(path)


def test_written_trace_is_read_back(tmp_path):
    trace = made(500)
    write_trace(tmp_path / "trace.json.gz", HEADER, trace["traceEvents"])
    assert load_trace(tmp_path / "trace.json.gz") == (HEADER, trace["traceEvents"])


EVENTS = [*step(1, 0, 1000), event("aten::mm", 0, 500), label("gloo:all_reduce", 1, 9, WORKER)]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json.gz"
    merge_traces([write_rank(tmp_path / "0.json", EVENTS)], path)
    return path


def refusal(path):
    """One line, or nothing where the change means nothing."""
    try:
        break_down([path])
    except UserError as error:
        message = str(error).replace(str(path), "trace")
        assert "\n" not in message and len(message) <= 300
        return message


@pytest.mark.parametrize("value", [None, "text", [{}], -1e3])
def test_any_value_of_a_trace_may_be_wrong(tmp_path, trace, value):
    whole = json.loads(gzip.decompress(trace.read_bytes()))
    path = tmp_path / "x.json"
    for key in whole:
        path.write_text(json.dumps({**whole, key: value}))
        assert refusal(path) is not None or key != "traceEvents"
    kinds = {(e["ph"], e.get("cat")): i for i, e in enumerate(whole["traceEvents"])}
    for i in kinds.values():
        for key in whole["traceEvents"][i]:
            events = [*whole["traceEvents"]]
            events[i] = {**events[i], key: value}
            path.write_text(json.dumps({**whole, "traceEvents": events}))
            assert refusal(path) is not None or key != "dur"


def test_every_torn_and_flipped_trace_is_one_line(trace):
    whole, chance = trace.read_bytes(), random.Random(0)
    for number in range(60):
        torn = bytearray(whole)
        if number % 3 == 0:
            del torn[chance.randrange(len(torn)) :]
        else:
            torn[chance.randrange(10, len(torn))] ^= 1 << chance.randrange(8)
        trace.write_bytes(torn)
        assert refusal(trace) is not None
