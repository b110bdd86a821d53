"""Timings: paired over repetitions, relative to one rank and to the no-communication bound."""

import math

import pytest

from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.report.sections.links import links
from shardlab.report.sections.scaling import (
    bottleneck,
    bottleneck_of,
    cores_note,
    scaling,
    scaling_rows,
)
from shardlab.report.tables import tables_of
from shardlab.report.timings import timing_table
from shardlab.report.write import write_report
from tests.evidence_factory import make_evidence
from tests.record_factory import BASELINE, make_record, make_records
from tests.timed_run_factory import make_timed, make_timings

DRIFT = [20.0, 40.0, 25.0, 90.0]


def pair(times: float = 2.0, **changes: object):
    """The baseline and its no-communication bound, so many times as fast in every repetition."""
    runs = [make_timed(run=run, **changes) for run in (BASELINE, NO_COMMUNICATION)]
    steps = [[times * step for step in DRIFT], DRIFT]
    return [run.model_copy(update={"step_ms": s}) for run, s in zip(runs, steps, strict=True)]


def row_of(timed, run, timing="slow"):
    table = timing_table(timed, BASELINE)
    return table[(table["run"] == run) & (table["timing"] == timing)].iloc[0]


def test_drift_common_to_all_runs_cancels_in_a_ratio():
    row = row_of(pair(1.5), BASELINE)
    for end in ("", "_low", "_high"):
        assert row[f"bound_ratio{end}"] == pytest.approx(1.5)
    assert row["step_ms_sd"] > 0.4 * row["step_ms"]


def test_efficiency_is_throughput_per_rank_against_one_rank():
    alone = make_timed("one-rank", world_size=1).model_copy(update={"step_ms": [30.0]})
    four = make_timed("four-ranks", world_size=4).model_copy(update={"step_ms": [40.0]})
    row = row_of([alone, four], BASELINE, "four-ranks")
    assert row["efficiency"] == pytest.approx(0.75)
    per_rank = row["tokens_per_s"] / 4
    assert per_rank / row_of([alone], BASELINE, "one-rank")["tokens_per_s"] == pytest.approx(0.75)
    assert math.isnan(row_of([four], BASELINE, "four-ranks")["efficiency"])


def test_ratio_to_an_untimed_baseline_is_nan():
    row = row_of([make_timed(run="ddp"), make_timed(run=NO_COMMUNICATION)], "ddp")
    assert math.isnan(row["step_ratio"]) and math.isfinite(row["bound_ratio"])


def test_frame_headers_are_not_counted_as_interface_excess():
    run = make_timed(bytes_wire=1e6, interface_bytes=1.02e6 + 66 * 700, interface_frames=700.0)
    assert row_of([run], BASELINE)["interface_excess"] == pytest.approx(0.02)
    assert math.isnan(row_of([make_timed("two-ranks")], BASELINE, "two-ranks")["interface_excess"])


@pytest.mark.parametrize(
    ("times", "exposed", "said"),
    [
        (3.0, 0.6, "communication is the bottleneck of fsdp2"),
        (1.5, 0.2, "communication is not the bottleneck of fsdp2"),
        (3.0, 0.2, "it is not clear whether communication is the bottleneck of fsdp2"),
        (1.5, 0.6, "it is not clear whether communication is the bottleneck of fsdp2"),
    ],
)
def test_the_bottleneck_is_judged_by_steps_and_trace(times, exposed, said):
    timed = pair(times)
    traced = timed[0].breakdown.model_copy(
        update={"profiled_step_ms": 100.0, "exposed_comm_ms": 100 * exposed}
    )
    timed[0] = timed[0].model_copy(update={"breakdown": traced})
    (sentence,) = bottleneck(timing_table(timed, BASELINE), BASELINE)
    assert sentence.startswith(f"On 2 ranks (link: 100mbit) {said}: its step takes {times:.2f} (")
    assert f"{exposed:.0%}".replace("%", " %") in sentence


def test_order_of_timings_does_not_matter():
    """As in params.yaml, where they are named."""
    timed = make_timings()
    by_name = sorted(timed, key=lambda run: run.timing)
    assert timed != by_name
    ours, theirs = (
        [scaling(evidence), links(evidence)]
        for timed in (timed, by_name)
        for evidence in [make_evidence(make_records(), timed=timed)]
    )
    assert [t.rows for t in tables_of(ours)] == [t.rows for t in tables_of(theirs)]
    assert ours[0].items == theirs[0].items
    assert [s.sentences for s in ours[1].sections] == [s.sentences for s in theirs[1].sections]


def test_bottleneck_is_undecided_after_a_single_repetition():
    timed = [run.model_copy(update={"step_ms": run.step_ms[:1]}) for run in pair(9.0)]
    (sentence,) = bottleneck(timing_table(timed, BASELINE), BASELINE)
    assert "a single repetition cannot show" in sentence


def test_bottleneck_of_the_training_setting_is_stated():
    table = timing_table(make_timings(), BASELINE)
    assert bottleneck_of(table, make_record()).startswith("On 2 ranks (link: loopback)")
    assert "is unknown" in bottleneck_of(table, make_record(world_size=8))
    assert "is unknown" in bottleneck_of(table, make_record(link="10gbit"))
    assert "does not communicate" in bottleneck_of(table, make_record(world_size=1))


def test_scaling_leaves_out_emulated_links():
    rows = scaling_rows(timing_table(make_timings(["ddp", "fsdp2"]), BASELINE))
    assert rows[["run", "world_size"]].to_numpy().tolist() == [
        [run, ranks] for run in ("ddp", "fsdp2", NO_COMMUNICATION) for ranks in (1, 2)
    ]


def test_shared_cores_are_reported():
    assert cores_note(timing_table(make_timings(), BASELINE)) is None
    crowded = timing_table([make_timed(world_size=4)], BASELINE)
    assert cores_note(crowded).startswith("4 ranks of 1 thread shared 2 cores")


def test_an_in_process_link_is_named():
    run = make_timed(link_emulation="in-process", interface_bytes=None)
    assert row_of([run], BASELINE)["link"] == "100mbit (in-process)"


@pytest.mark.long
@pytest.mark.parametrize("timing", ["two-ranks", "slow"])
def test_report_accepts_a_single_timing(without_png, tmp_path, timing):
    timed = [make_timed(timing, run) for run in ("ddp", NO_COMMUNICATION)]
    write_report(make_evidence(make_records(["fsdp2", "ddp"]), timed=timed), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Is communication the bottleneck?" in text
    assert (tmp_path / "plots/crossover.png").exists()
