"""Whatever the layout of a trace: the events that json.load sees, or one line of refusal."""

import gzip
import json

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.trace_file import read_events, read_header, write_trace
from tests.trace_factory import event

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
        assert list(read_events(path)) == json.loads(text)["traceEvents"]
        assert read_header(path)["distributedInfo"] == HEADER["distributedInfo"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_trace_is_refused(layout, tmp_path):
    whole = LAYOUTS[layout](made(400)).rstrip()
    path = tmp_path / "trace.json"
    for length in (0, 30, len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:length])
        with pytest.raises(UserError, match="not a whole trace") as refusal:
            list(read_events(path))
        assert "\n" not in str(refusal.value)


def test_written_trace_is_read_back(tmp_path):
    trace = made(500)
    write_trace(tmp_path / "trace.json.gz", HEADER, trace["traceEvents"])
    assert list(read_events(tmp_path / "trace.json.gz")) == trace["traceEvents"]
    assert read_header(tmp_path / "trace.json.gz") == HEADER
