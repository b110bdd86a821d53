import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import write_json_lines
from shardlab.results.run_record import (
    SCHEMA_VERSION,
    Record,
    read_records,
    table_row,
    write_records,
)
from shardlab.results.timing_record import scaling_efficiency
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES, make_record, make_records
from tests.timed_run_factory import make_timed

RECORDS = [*make_records(), make_record(diverged_at=7, train_loss=None)]


def test_records_round_trip(tmp_path: Path) -> None:
    write_records(tmp_path / "results.jsonl", RECORDS)
    assert read_records(tmp_path / "results.jsonl") == RECORDS


@pytest.mark.parametrize("record", RECORDS[-2:])
def test_a_row_is_flat_and_holds_every_value(record: Record) -> None:
    row = table_row(record)
    assert list(row) == list(Record.model_fields)
    for key, value in record.model_dump(mode="json").items():
        nested = isinstance(value, dict | list)
        assert (json.loads(row[key]) if nested else row[key]) == value


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema_version": SCHEMA_VERSION + 1}, r"\.schema_version"),
        ({"speed": 1.0}, r"\.speed: unknown key"),
        ({"steps": "many"}, r"\.steps: input should be a valid integer"),
    ],
)
def test_invalid_record_is_named_by_file_and_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = RECORDS[0].model_dump(mode="json")
    write_json_lines(tmp_path / "results.jsonl", [good, good | change])
    with pytest.raises(UserError, match=rf"results\.jsonl:2{message}"):
        read_records(tmp_path / "results.jsonl")


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
