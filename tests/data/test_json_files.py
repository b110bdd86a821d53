"""JSON arrays and JSON lines: what is read, what is a bad record, and what is refused."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data.local_files import read_json_array, read_json_lines
from shardlab.data.source_records import RecordCounts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
RECORDS = st.lists(st.fixed_dictionaries({"id": TEXT, "title": TEXT, "text": TEXT}), max_size=8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "in.json"


def read(path, content, reader, policy="refuse"):
    path.write_bytes(content)
    counts = RecordCounts(policy, path.name)
    values = [value for *_, value in reader(path, counts)]
    return values, counts.as_json()["bad_records"]["first"]


@given(RECORDS, st.booleans(), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_any_records_survive(file, records, ascii_only, mark):
    lines = [json.dumps(record, ensure_ascii=ascii_only).encode() for record in records]
    for content, reader in (
        (b"[%b]" % b",\n".join(lines), read_json_array),
        (b"\n".join(lines), read_json_lines),
    ):
        assert read(file, mark + content, reader)[0] == records


def test_a_truncated_array_ends_with_its_record(file):
    content = b'[{"text": "a"}, {"text": "\\u00e9 \\\\"}, {"text": ""}]'
    for cut in range(1, len(content)):
        record = content[:cut].count(b"}") + 1
        with pytest.raises(UserError, match=f"record {record}: cannot be read as a JSON array"):
            read(file, content[:cut], read_json_array)


@pytest.mark.parametrize("policy", ["refuse", "skip"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "record 1: cannot be read as a JSON array"),
        (
            b'{"title": "a"}',
            "record 1: .*expected an array of records; .* set data.source to jsonl",
        ),
        (b"3", "expected an array"),
        (b'[{"a": "b"}, {"a": ?}]', "record 2: .*invalid char"),
        (b'[{"a": "\xff"}]', "record 1: .*invalid bytes in UTF8"),
        (b'[{"a": "\\udc00"}]', "record 1: not UTF-8"),
        (b"[1]\n[]", "record 2: .*trailing garbage"),
        (b"[1,]", "record 2: "),
        (b"[NaN]", "record 1: "),
        (b"[" * 32_000, "record 1: .*nested more than 1024 levels deep"),
        (b'["a", "%b"]' % (b"x" * (40 << 20)), "record 2: .*a record of over 32 MiB"),
    ],
    ids=range(11),
)
def test_a_malformed_array_is_one_line_with_the_record(file, content, message, policy):
    with pytest.raises(UserError, match=message) as caught:
        read(file, content, read_json_array, policy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_line_that_is_too_large_is_a_bad_record(file):
    content = b'1\n"%b"\n2' % (b"x" * (17 << 20))
    records = read(file, content, read_json_lines, "skip")
    assert records == ([1, 2], ["line 2: larger than 16 MiB"])


def test_a_line_that_is_not_json_is_counted_and_named_or_refused(file):
    content = b'{"a": 1}\n\n{"a": ?}\n"\xff"\n"\\ud800"\n[2]'
    values, named = read(file, content, read_json_lines, "skip")
    assert values == [{"a": 1}, [2]]
    assert [name.split(" (")[0] for name in named] == [f"line {n}: not JSON" for n in (3, 4, 5)]
    with pytest.raises(UserError, match=r"in\.json: line 3: not JSON .*set data\.bad_records"):
        read(file, content, read_json_lines)


def test_a_damaged_archive_is_refused_by_name(tmp_path):
    path = tmp_path / "in.json.gz"
    with pytest.raises(UserError, match=r"in\.json\.gz: cannot be unpacked as \.gz .*fetch it"):
        read(path, gzip.compress(b"[1, 2]" * 1000)[:-9], read_json_lines)


def test_a_number_may_have_any_length(file):
    content = b"[%b%b]" % (b'{"text": "a"},' * 30_000, b"1" * 5_000)
    assert read(file, content, read_json_array)[0][-1] == (10**5_000 - 1) // 9
