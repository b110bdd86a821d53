import json
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.config.contention import Contention
from shardlab.config.run_record import (
    SCHEMA_VERSION,
    Record,
    read_records,
    table_row,
    write_records,
)
from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import scaling_efficiency
from shardlab.core.errors import UserError
from shardlab.core.files import write_json_lines
from tests.record_factory import STRATEGIES
from tests.timed_run_factory import make_timed

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: NUMBERS,
    str: st.text(max_size=5),
    dict[str, float | None]: st.dictionaries(st.text(max_size=5), st.none() | NUMBERS, max_size=2),
    dict[str, float]: st.dictionaries(st.text(max_size=5), NUMBERS, max_size=2),
    Contention: st.builds(Contention, foreign=NUMBERS, stolen=NUMBERS),
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
@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_records_round_trip(
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
def test_invalid_record_is_named_by_file_and_line(
    tmp_path_factory: pytest.TempPathFactory, record: Record, change: dict[str, Any], message: str
) -> None:
    path = tmp_path_factory.mktemp("records") / "results.jsonl"
    good = record.model_dump(mode="json")
    write_json_lines(path, [good, good | change])
    with pytest.raises(UserError, match=rf"results\.jsonl:2{message}"):
        read_records(path)


DDP = parse_strategy(STRATEGIES["ddp"]).hash()
ALONE = make_timed("one-rank", "ddp", 1, step_ms=[10.0, 20.0])
TWO = make_timed("two-ranks", "ddp", 2, step_ms=[20.0, 30.0])
SLOW = make_timed("slow", "ddp", 2, step_ms=[150.0])
TIMED = [ALONE, TWO, SLOW, make_timed("two-ranks", "fsdp2", 2)]


def test_scaling_efficiency_is_the_ratio_of_step_times() -> None:
    assert scaling_efficiency(TIMED, DDP, 2, "loopback") == 0.6
    assert scaling_efficiency(TIMED, DDP, 2, SLOW.link) == 0.1
    assert scaling_efficiency(TIMED, DDP, 1, "loopback") == 1.0


def test_scaling_efficiency_is_none_without_both_timings() -> None:
    fsdp2 = parse_strategy(STRATEGIES["fsdp2"]).hash()
    assert scaling_efficiency(TIMED, DDP, 4, "loopback") is None
    assert scaling_efficiency(TIMED, DDP, 2, "10mbit") is None
    assert scaling_efficiency(TIMED, fsdp2, 2, "loopback") is None
    assert scaling_efficiency([TWO], DDP, 2, "loopback") is None
