"""Means over seeds, and paired comparison of runs: what all runs of a row share cancels."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.report.aggregate import (
    comparison,
    loss_curves,
    paired_difference,
    paired_ratio,
    select,
)
from shardlab.report.sections import runs
from shardlab.report.tables import tables_of
from shardlab.report.timings import timing_table
from shardlab.results.collect import read_losses
from shardlab.results.train_result import Setting
from shardlab.strategy.document import parse_strategy
from tests.evidence_factory import make_evidence
from tests.record_factory import BASELINE, make_record, make_records
from tests.timed_run_factory import make_timed

positive = st.floats(0.01, 1e6)


def compare(records, **steps):
    """`comparison` with made timings, in which runs may have given steps."""
    timed = [
        make_timed("two-ranks", run, **({"step_ms": steps[run]} if run in steps else {}))
        for run in dict.fromkeys(record.run for record in records)
    ]
    return comparison(records, timing_table(timed, BASELINE), BASELINE)


def test_means_and_deviations_are_over_seeds():
    times = (40, 42, 47)
    records = [make_record(seed=seed, step_ms_mean=time) for seed, time in enumerate(times)]
    row = compare(records).loc[BASELINE]
    assert row["step_ms_mean"] == 43
    assert row["step_ms_mean_sd"] == pytest.approx(np.std(times, ddof=1))
    assert row["seeds"] == 3


def test_step_times_are_compared_by_the_repetitions_of_the_timing():
    """Whatever the training runs took: they are of other minutes."""
    records = [make_record(seed=seed, step_ms_mean=10.0) for seed in range(3)]
    records += [make_record("ddp", seed, step_ms_mean=99.0) for seed in range(3)]
    row = compare(records, fsdp2=[20.0, 40.0, 80.0], ddp=[10.0, 20.0, 40.0]).loc["ddp"]
    assert [row[f"step_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.5] * 3)
    assert row["step_ms"] == pytest.approx(70 / 3)
    assert row["tokens_per_s"] == pytest.approx(2 * 8 * 64 / row["step_ms"] * 1e3)
    assert row["repetitions"] == 3
    of_ranks = 2 * records[-1].product_flops_per_s
    share = records[-1].flops_per_token * row["tokens_per_s"] / of_ranks
    assert row["flops_share"] == pytest.approx(share)
    assert row["step_ms_mean"] == 99.0


def test_utilization_is_of_the_fastest_products_that_a_run_of_the_dtype_measured():
    """Else a run whose products were measured beside other work would pass 100 %."""
    slow, fast = 1e10, 5e10
    records = [make_record(product_flops_per_s=slow), make_record("ddp", product_flops_per_s=fast)]
    rows = compare(records, fsdp2=[20.0, 20.0], ddp=[20.0, 20.0])
    assert rows.loc[BASELINE, "flops_share"] == pytest.approx(rows.loc["ddp", "flops_share"])


def test_memory_is_compared_in_bytes_seed_by_seed():
    records = [make_record(seed=seed, memory_peak_bytes=1000 + seed) for seed in range(2)]
    records += [make_record("ddp", seed, memory_peak_bytes=1500 + 201 * seed) for seed in range(2)]
    assert compare(records).loc["ddp", "memory_change"] == 600


def test_select_refuses_missing_records():
    records = make_records(["fsdp2", "ddp"])
    assert [(r.run, r.seed) for r in select(records, ["ddp"], [2, 0])] == [("ddp", 2), ("ddp", 0)]
    with pytest.raises(UserError, match="'ddp' seed 7 is missing"):
        select(records, ["ddp"], [7])


def test_loss_curve_is_the_mean_over_seeds_and_ends_where_one_stopped():
    table = loss_curves({"ddp": {0: {0: 4.0, 1: 2.0, 2: 1.0}, 1: {0: 6.0, 1: 3.0}}})
    assert table["step"].tolist() == [0, 1, 2]
    assert table["loss"].tolist()[:2] == [5.0, 2.5]
    assert table["sd"].tolist()[:2] == pytest.approx([math.sqrt(2), math.sqrt(0.5)])
    assert table["loss"].isna().tolist() == [False, False, True]


def test_every_numeric_field_of_a_record_is_a_measure():
    compared = compare(make_records(["fsdp2"]))
    texts = {"strategy", "engine", "codec"}
    numbers = {
        name
        for name, value in make_record().model_dump(exclude=texts).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    settings = {*Setting.model_fields, "schema_version"}
    assert numbers - settings <= set(compared.columns)


def with_account(record, kind, **changes):
    """Change the ledger of a record."""
    ledger = {**record.ledger, kind: {**record.ledger[kind], **changes}}
    return record.model_copy(update={"ledger": ledger})


def test_uncompressed_messages_are_means_over_all_seeds():
    one, other = make_record(BASELINE, 0), make_record(BASELINE, 1)
    one = with_account(one, "gradients", uncompressed={"warm-up": 3.0, "not float32": 1.0})
    other = with_account(other, "gradients", uncompressed={"warm-up": 1.0})
    other = with_account(other, "weights", uncompressed={"not float32": 4.0})
    assert json.loads(compare([one, other]).loc[BASELINE, "uncompressed"]) == {
        "gradients, not float32": 0.5,
        "gradients, warm-up": 2.0,
        "weights, not float32": 2.0,
    }


def test_tables_show_the_ledger_and_the_codecs_with_their_options():
    gradients = {"codec": "int4:levels=nf4", "between_nodes": "topk:density=0.05"}
    gradients |= {"error_feedback": True, "residual": "bf16"}
    strategy = parse_strategy({"gradients": gradients, "weights": {"codec": "fp8"}})
    account = {"bytes_raw": 2e6, "bytes_wire": 2.5e5, "bytes_between_nodes": 1e5}
    other = make_record("both", strategy=strategy.model_dump(mode="json"))
    other = with_account(other, "gradients", **account)
    other = with_account(other, "weights", bytes_between_nodes=5e4)
    evidence = make_evidence([make_record(BASELINE), other])
    cells = {
        column.heading: cell
        for table in tables_of([runs.traffic(evidence), runs.codec_statistics(evidence)])
        for column, cell in zip(table.columns, table.rows[1], strict=True)
    }
    shown = {
        "gradients codec": "int4:group=128,levels=nf4, topk:density=0.05 between nodes",
        "weights codec": "fp8:format=e4m3",
        "error feedback": "bf16",
        "gradients raw, MB/step": "2.00",
        "gradients wire, MB/step": "0.250",
        "gradients ratio": "8.00",
        "weights ratio": "1.00",
        "between nodes, MB/step": "0.150",
    }
    assert {heading: cells[heading] for heading in shown} == shown


def test_paired_difference_by_hand():
    values = pd.DataFrame({"base": [9.0, 10.0, 12.5], "other": [10.0, 12.0, 14.0]})
    result = paired_difference(values, "base").loc["other"]
    # differences 1, 2, 1.5: mean 1.5, deviation 0.5; t(0.975, 2) = 4.302653 from printed tables
    half = 4.302653 * 0.5 / math.sqrt(3)
    assert result["mean"] == 1.5
    assert result["low"] == pytest.approx(1.5 - half, rel=1e-6)
    assert result["high"] == pytest.approx(1.5 + half, rel=1e-6)
    mean, low, high = paired_difference(values[:1], "base").loc["other"]
    assert mean == 1 and math.isnan(low) and math.isnan(high)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_difference_is_antisymmetric(pairs):
    values = pd.DataFrame(pairs, columns=["a", "b"])
    forth = paired_difference(values, "a").loc["b"]
    back = paired_difference(values, "b").loc["a"]
    assert forth.tolist() == pytest.approx([-back["mean"], -back["high"], -back["low"]])
    assert forth["low"] <= forth["mean"] <= forth["high"]


@given(
    st.lists(st.tuples(positive, positive), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
)
def test_what_slows_all_steps_of_a_repetition_cancels(pairs, slower):
    """As a process beside the ranks does, in some repetitions more than in others."""
    values = pd.DataFrame(pairs, columns=["a", "b"])
    disturbed = values.mul(slower[: len(values)], axis=0)
    expected = paired_ratio(values, "a").loc["b"].tolist()
    assert paired_ratio(disturbed, "a").loc["b"].tolist() == pytest.approx(expected, rel=1e-6)


def test_memory_is_over_its_estimate_and_perplexity_over_that_at_the_start():
    changes = {"memory_growth_bytes": 60, "memory_estimate_bytes": 40}
    row = compare([make_record(val_ppl=200.0, untrained_ppl=2000.0, **changes)]).loc[BASELINE]
    assert (row["memory_ratio"], row["untrained_factor"]) == (1.5, 10.0)


def test_traced_steps_say_nothing_of_exchanges_that_are_too_rare_to_be_traced():
    form = parse_strategy({"engine": "ddp", "sync": {"every": 500}}).canonical()
    rare = make_record("rare", strategy=form.model_dump(mode="json"))
    found = compare([make_record(), rare])
    traced = ["comm_share", "exposed_comm_ms", "profiled_step_ms"]
    assert found.loc["rare", traced].isna().all() and found.loc[BASELINE, traced].notna().all()


def test_losses_of_a_run_say_where_the_model_was_evaluated(tmp_path):
    path = tmp_path / "train/a-run/seed3/events.jsonl"
    path.parent.mkdir(parents=True)
    events = [{"step": 0, "loss": 5.0}, {"step": 1, "loss": None, "val_loss": None}]
    events += [{"step": 2, "loss": 3.0, "val_loss": 4.0}]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    curve = read_losses(tmp_path, "a-run", 3)
    assert curve["loss"].fillna(0).tolist() == [5.0, 0.0, 3.0]
    assert curve["val_loss"].fillna(0).tolist() == [0.0, 0.0, 4.0]
    assert curve["evaluated"].tolist() == [False, True, True]
