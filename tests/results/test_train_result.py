"""Results of training runs: their row in a table, and their failure where they have no quality."""

import json

import pytest

from shardlab.results.train_result import TrainResult, table_row
from tests.record_factory import make_record, make_records


@pytest.mark.parametrize("result", [*make_records(["fsdp2-int8"]), make_record(diverged_at=7)])
def test_a_row_is_flat_and_holds_every_value(result: TrainResult) -> None:
    row = table_row(result)
    assert list(row) == list(TrainResult.model_fields)
    for key, value in result.model_dump(mode="json").items():
        nested = isinstance(value, dict | list)
        assert (json.loads(row[key]) if nested else row[key]) == value


def test_a_run_that_diverged_is_a_failure_with_its_own_header() -> None:
    result = make_record("ddp", 3, diverged_at=7)
    failure = result.failure()
    assert (failure.outcome, failure.detail) == ("diverged", "diverged at step 7")
    assert (failure.source, failure.seed, failure.header()) == ("run ddp", 3, result.header())
    with pytest.raises(ValueError, match="it has quality"):
        make_record("ddp").failure()
