import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data.sources.records import read_json_array

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
RECORDS = st.lists(st.fixed_dictionaries({"id": TEXT, "title": TEXT, "text": TEXT}), max_size=8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "array.json"


@given(RECORDS, st.booleans())
def test_any_text_survives(file, records, ascii_only):
    file.write_text(json.dumps(records, ensure_ascii=ascii_only), encoding="utf-8")
    assert [value for *_, value in read_json_array(file)] == records


@given(st.data())
def test_truncated_file_is_reported_by_byte_and_record(file, data):
    records = data.draw(RECORDS.filter(bool))
    pieces = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    whole = b"[" + b",".join(pieces) + b"]"
    cut = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(whole[:cut])
    ends = [1 + sum(len(piece) + 1 for piece in pieces[: i + 1]) - 1 for i in range(len(pieces))]
    record = sum(end <= cut for end in ends) + 1
    with pytest.raises(UserError, match=rf"byte {cut}, record {record}: .*truncated"):
        list(read_json_array(file))


def test_memory_does_not_grow_with_the_file(file):
    peaks = []
    for records in (5_000, 50_000):
        content = ",".join(['{"title":"a","text":"%s"}' % ("x" * 300)] * records)
        file.write_text(f"[{content}]")
        del content
        tracemalloc.start()
        assert sum(1 for _ in read_json_array(file)) == records
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000


@pytest.mark.parametrize("good", [0, 1, 700, 5000])
def test_syntax_error_is_reported_by_byte_and_record(file, good):
    records = b"".join(b'{"title":"a","text":"%060d"},' % i for i in range(good))
    before = b"[" + records + b'{"title":"b",'
    file.write_bytes(before + b'#"text":"c"}]')
    with pytest.raises(UserError, match=rf"byte {len(before)}, record {good + 1}: "):
        list(read_json_array(file))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "byte 0, record 1"),
        (b'{"title": "a"}', "byte 0, record 1: expected a JSON array"),
        (b'[{"title": "\xff"}]', "byte 12, record 1"),
        (b'[{"title": "a"}]\n[]', "byte 17, record 2"),
        (b'[{"title": "a"},]', "byte 16, record 2"),
        (b'[{"title": NaN}]', "byte 11, record 1"),
    ],
)
def test_other_content_than_an_array_is_refused_in_one_line(file, content, place):
    file.write_bytes(content)
    with pytest.raises(UserError, match=place) as caught:
        list(read_json_array(file))
    assert "\n" not in str(caught.value)
