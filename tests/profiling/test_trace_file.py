"""Whatever the layout of a trace: the events that json.load sees, or one line of refusal."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.profiling import trace_file
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


@settings(deadline=None, max_examples=40)
@given(block=st.integers(1, 900), layout=st.sampled_from(sorted(LAYOUTS)))
def test_block_boundaries_do_not_matter(block, layout, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    path.write_text(LAYOUTS[layout](made(9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_file, "_BLOCK", block)
        assert list(read_events(path)) == made(9)["traceEvents"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_trace_is_refused(layout, tmp_path):
    whole = LAYOUTS[layout](made(400)).rstrip()
    path = tmp_path / "trace.json"
    for length in (0, 30, len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:length])
        with pytest.raises(UserError, match="not a whole trace") as refusal:
            list(read_events(path))
        assert "\n" not in str(refusal.value)


def test_nested_lists_are_not_mistaken_for_events(tmp_path):
    nested = event("aten::mm", 0, 1) | {"args": {"list": [{"a": 1}, {"b": 2}]}}
    text = json.dumps({"traceEvents": [nested] * 500}, indent=2).replace("      ", "    ")
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert list(read_events(path)) == [nested] * 500


def test_written_trace_is_read_back(tmp_path):
    trace = made(500)
    write_trace(tmp_path / "trace.json.gz", HEADER, trace["traceEvents"])
    assert list(read_events(tmp_path / "trace.json.gz")) == trace["traceEvents"]
    assert read_header(tmp_path / "trace.json.gz") == HEADER


@pytest.mark.long
def test_memory_does_not_grow_with_the_trace(tmp_path):
    def peak(count):
        path = tmp_path / f"{count}.json"
        path.write_text(kineto(made(count)))
        tracemalloc.start()
        for _ in read_events(path):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(40_000) < 1.2 * peak(10_000)
