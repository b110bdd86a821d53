"""A trace that is not whole, or says what no profiler writes, is refused in one line."""

import gzip
import json
import random
import re

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.trace_file import load_trace, write_trace
from tests.trace_factory import WORKER, event, label, step, write_rank

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
    document = json.loads(gzip.decompress(trace.read_bytes()))
    path = tmp_path / "x.json"
    for key in document:
        path.write_text(json.dumps({**document, key: value}))
        assert refusal(path) is not None or key != "traceEvents"
    kinds = {(e["ph"], e.get("cat")): i for i, e in enumerate(document["traceEvents"])}
    for i in kinds.values():
        for key in document["traceEvents"][i]:
            events = [*document["traceEvents"]]
            events[i] = {**events[i], key: value}
            path.write_text(json.dumps({**document, "traceEvents": events}))
            assert refusal(path) is not None or key != "dur"


def test_every_torn_and_flipped_trace_is_one_line(tmp_path, trace):
    original, chance = trace.read_bytes(), random.Random(0)
    for number in range(60):
        torn = bytearray(original)
        if number % 3 == 0:
            del torn[chance.randrange(len(torn)) :]
        else:
            torn[chance.randrange(10, len(torn))] ^= 1 << chance.randrange(8)
        trace.write_bytes(torn)
        assert refusal(trace) is not None
    text, plain = gzip.decompress(original).rstrip(), tmp_path / "plain.json"
    for length in (0, 30, len(text) // 2, len(text) - 1):
        plain.write_bytes(text[:length])
        with pytest.raises(UserError, match="incomplete trace"):
            load_trace(plain)
    plain.write_text('{"schema": "1.0.3", "nodes": []}')
    assert "not a trace of torch.profiler (no traceEvents)" in refusal(plain)
    with pytest.raises(UserError, match="no such trace"):
        load_trace(tmp_path / "none.json")


def test_written_trace_is_read_back(tmp_path):
    header = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "pg_config": [{"ranks": [0, 1]}]}}
    events = [event('a "quoted" }, {\n  },\n ü \\', 10.125 * i, 10.125 * i + 3) for i in range(500)]
    write_trace(tmp_path / "trace.json.gz", header, events)
    assert load_trace(tmp_path / "trace.json.gz") == (header, events)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"aten::mm", b"aten::\nmm\t"),
        lambda text: text.replace(b"aten::mm", b"aten::mm \xe9"),
        lambda text: text.replace(b'"External id": 1', b'"Bandwidth": NaN'),
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: json.dumps(json.loads(text)["traceEvents"]).encode(),
        lambda text: re.sub(rb'"(ts|dur)": ([0-9.]+)', rb'"\1": "\2"', text),
    ],
)
def test_what_profilers_write_beyond_json_is_read(tmp_path, change):
    path = write_rank(tmp_path / "0.json", EVENTS)
    expected = break_down([path]).steps
    path.write_bytes(change(path.read_bytes()))
    for steps in expected, break_down([path]).steps:
        assert [(step.step_ms, step.compute_ms) for step in steps] == [(1.0, 0.5)]
