import json
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.records.run import SCHEMA_VERSION, Record, read_records, table_row, write_records

NUMBERS = st.floats(allow_nan=False)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: NUMBERS,
    str: st.text(max_size=5),
    dict[str, float | None]: st.dictionaries(st.text(max_size=5), st.none() | NUMBERS, max_size=2),
    dict[str, float]: st.dictionaries(st.text(max_size=5), NUMBERS, max_size=2),
    list[str]: st.lists(st.text(max_size=5), max_size=2),
    dict[str, Any]: st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
}


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(
            st.none() if part is type(None) else values_of(part) for part in get_args(annotation)
        )
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    return BY_TYPE[annotation]


RECORDS = st.fixed_dictionaries(
    {
        name: values_of(field.annotation)
        for name, field in Record.model_fields.items()
        if name != "schema_version"
    }
).map(Record.model_validate)


@settings(max_examples=30)
@given(st.lists(RECORDS, max_size=3))
def test_records_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    path = tmp_path_factory.mktemp("records") / "results.jsonl"
    write_records(path, records)
    assert read_records(path) == records


@settings(max_examples=30)
@given(RECORDS)
def test_a_row_is_flat_and_holds_every_value(record: Record) -> None:
    row = table_row(record)
    assert list(row) == list(Record.model_fields)
    for key, value in record.model_dump(mode="json").items():
        nested = isinstance(value, dict | list)
        assert (json.loads(row[key]) if nested else row[key]) == value


@settings(max_examples=1)
@given(record=RECORDS)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema_version": SCHEMA_VERSION + 1}, r"\.schema_version"),
        ({"schema_version": SCHEMA_VERSION - 1}, ": a record of schema version .* train the run"),
        ({"speed": 1.0}, r"\.speed: unknown key"),
        ({"steps": "many"}, r"\.steps: input should be a valid integer"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_file_and_line(
    tmp_path_factory: pytest.TempPathFactory, record: Record, change: dict[str, Any], message: str
) -> None:
    path = tmp_path_factory.mktemp("records") / "results.jsonl"
    good = record.model_dump(mode="json")
    path.write_text("".join(json.dumps(line) + "\n" for line in (good, good | change)))
    with pytest.raises(UserError, match=rf"results\.jsonl:2{message}"):
        read_records(path)
