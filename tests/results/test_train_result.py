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


MEASURES = """
step_ms_mean step_ms_p50 step_ms_p90 step_ms_p95 tokens_per_s comm_ms_per_step comm_share
comm_ms_by_op exposed_comm_ms overlap backward_comm_share bytes_raw bytes_wire compression_ratio
train_loss val_loss val_ppl val_bits_per_byte encode_ms decode_ms extra_collectives
extra_collective_ms index_bytes metadata_bytes density residual_norm grad_rel_error grad_cosine
memory_peak_bytes memory_reserved_bytes memory_estimate_bytes effective_bandwidth_raw
effective_bandwidth_wire scaling_efficiency flops_share invalid_steps clipped_steps skipped_steps
interface_bytes
"""
"""names that scripts of users read; those of times to a loss are in quality.jsonl"""


def test_a_result_has_the_measures_by_their_names() -> None:
    row = table_row(make_record("fsdp2-int8"))
    facts = "schema_version revision torch host params_hash run seed engine codec codec_config link"
    assert {*MEASURES.split(), *facts.split()} <= row.keys()


def test_a_run_that_diverged_is_a_failure_with_its_own_header() -> None:
    result = make_record("ddp", 3, diverged_at=7)
    failure = result.failure()
    assert (failure.outcome, failure.detail) == ("diverged", "diverged at step 7")
    assert (failure.source, failure.seed, failure.header()) == ("run ddp", 3, result.header())
    with pytest.raises(ValueError, match="it has quality"):
        make_record("ddp").failure()
