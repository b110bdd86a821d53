import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data import json_files
from shardlab.data.json_files import read_json_array
from shardlab.data.source_records import Tally

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
RECORDS = st.lists(st.fixed_dictionaries({"id": TEXT, "title": TEXT, "text": TEXT}), max_size=8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "array.json"


def read(file, policy="refuse"):
    return [value for *_, value in read_json_array(file, Tally(policy, str(file)))]


@pytest.fixture(params=[1, 2, 7, 1 << 18])
def chunk(request, monkeypatch):
    """Sizes of a read, so that strings, escapes and records are cut everywhere."""
    monkeypatch.setattr(json_files, "_CHUNK", request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RECORDS, st.booleans())
def test_any_text_survives(file, chunk, records, ascii_only):
    file.write_text(json.dumps(records, ensure_ascii=ascii_only), encoding="utf-8")
    assert read(file) == records


@given(st.data())
def test_truncated_file_is_reported_by_byte_and_record(file, data):
    records = data.draw(RECORDS.filter(bool))
    pieces = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    whole = b"[" + b",".join(pieces) + b"]"
    cut = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(whole[:cut])
    ends = [sum(len(piece) + 1 for piece in pieces[: i + 1]) for i in range(len(pieces))]
    record = sum(end < cut for end in ends) + 1
    with pytest.raises(UserError, match=rf"record {record}, byte {cut}: (.*truncated|expected a)"):
        read(file)


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(file):
    peaks = []
    for records in (5_000, 50_000):
        content = ",".join(['{"title":"a","text":"%s"}' % ("x" * 300)] * records)
        file.write_text(f"[{content}]")
        del content
        tracemalloc.start()
        assert sum(1 for _ in read_json_array(file, Tally("refuse", ""))) == records
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000


@pytest.mark.parametrize("good", [0, 1, 700, 5000])
def test_syntax_error_is_reported_by_byte_and_record(file, good):
    records = b"".join(b'{"title":"a","text":"%060d"},' % i for i in range(good))
    before = b"[" + records + b'{"title":"b",'
    file.write_bytes(before + b'#"text":"c"}]')
    with pytest.raises(UserError, match=rf"record {good + 1}, byte {len(before)}: not JSON"):
        read(file)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "record 1, byte 0: expected a JSON array"),
        (b'{"title": "a"}', "record 1, byte 0: expected a JSON array"),
        (b"\xff\xfe[\x00]\x00", "byte 0: this is UTF-16"),
        (b'[{"title": "\xff"}]', "record 1, byte 12: not UTF-8"),
        (b'[{"title": "a"}]\n[]', "byte 17: text after the array"),
        (b'[{"title": "a"},]', "record 2, byte 16: not JSON"),
        (b'[{"title": NaN}]', "record 1, byte 11: not JSON"),
    ],
)
def test_other_content_than_an_array_is_refused_in_one_line(file, chunk, content, place):
    file.write_bytes(content)
    with pytest.raises(UserError, match=place) as caught:
        read(file)
    assert "\n" not in str(caught.value)
