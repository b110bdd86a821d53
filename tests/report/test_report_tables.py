import math
from dataclasses import replace

import pytest

from shardlab.core.numbers import ABSENT, figure, number, percent, plus_minus, rough, scientific
from shardlab.report.answer import answer
from shardlab.report.markdown import escape, unescape
from shardlab.report.sections.appendix import environment, setting_line
from shardlab.report.sections.forecast import accuracy, forecast
from shardlab.report.sections.runs import comparison_table
from shardlab.report.tables import (
    ONE_DEVICE,
    RUN,
    Column,
    flatten,
    make_table,
    spread,
    tables_of,
)
from shardlab.report.write import (
    comparison_rows,
    headline_markdown,
    report_sections,
)
from shardlab.results.timing_result import NO_COMMUNICATION
from tests.evidence_factory import make_evidence, make_forecast
from tests.record_factory import BASELINE, BUSY, STRATEGIES, make_record, make_records
from tests.timed_run_factory import make_timed, make_timings


def test_every_table_of_runs_has_every_run():
    shown = tables_of(report_sections(make_evidence(make_records())))
    tables = [t for t in shown if t.highlighted and t.columns[0] == RUN]
    of_matrix = [t for t in tables if "no communication" not in {row[0] for row in t.rows}]
    assert len(of_matrix) >= 7
    for table in of_matrix:
        assert [row[0] for row in table.rows if row[0] != ONE_DEVICE] == list(STRATEGIES)
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert [table.rows[number][0] for number in table.highlighted] == [BASELINE]


def test_bytes_are_of_training_and_of_the_timing_where_nothing_was_trained():
    records = [*make_records(["fsdp2"]), *(make_record("ddp", s, bytes_wire=7.0) for s in range(3))]
    rows = {row["run"]: row["bytes_wire"] for row in make_evidence(records).main_rows}
    assert rows["ddp"] == 7.0 and rows["fsdp2-int8"] > 7.0


def test_a_heading_has_one_meaning_on_the_page():
    meanings = {}
    for table in tables_of(report_sections(make_evidence(make_records()))):
        for column in table.columns:
            if column.meaning:
                meanings.setdefault(column.heading, set()).add(column.meaning)
    assert [heading for heading, texts in meanings.items() if len(texts) > 1] == []


def test_a_column_shows_texts_numbers_in_its_unit_and_deviations():
    row = {"bytes": 2e6, "share": 0.25, "none": math.nan, "name": "ddp", "count": 3, "run": "a"}
    row |= {"step": 2.0, "step_sd": 0.1}
    columns = [
        Column("a", "MB/step", "bytes", digits=4),
        Column("b", "% of step", "share"),
        Column("c", "MB", "none"),
        Column("d", "", "name"),
        Column("e", "", "count"),
        Column("f", "ms", spread("step")),
    ]
    table = make_table("t", columns, [row])
    assert table.rows == [["2.000", "25.0", ABSENT, "ddp", "3", "2.00 ± 0.10"]]
    assert "not applicable" in table.note
    assert not make_table("a", ["b"], [["c"]]).note


def diverged(run, seed, **changes):
    lost = dict.fromkeys(("train_loss", "val_loss", "val_ppl", "val_bits_per_byte"))
    reason = "validation loss is not finite"
    return make_record(run, seed, **lost, diverged_at=7, steps=10, not_finite=reason, **changes)


def test_a_table_shows_the_step_at_which_a_run_diverged():
    records = [*make_records(["fsdp2"]), *(diverged("ddp", seed) for seed in range(3))]
    records += [diverged("manual", 0), make_record("manual", 1), make_record("manual", 2)]
    evidence = make_evidence(records)
    table = comparison_table(evidence)
    perplexity = [column.title for column in table.columns].index("val. perplexity")
    shown = {row[0]: row[perplexity] for row in table.rows}
    assert shown["ddp"] == "diverged at step 7"
    assert shown["manual"] == "diverged at step 7 (seed 0)"
    assert "not finite as the run diverged" in table.note
    found = answer(evidence)
    assert "ddp diverged at step 7; manual diverged at step 7 (seed 0)" in found.warnings[0]
    assert "use ddp" not in " ".join(found.lines)
    assert comparison_rows(evidence.compared)[1]["val_ppl"] is None
    # the baseline may diverge, too
    records = [diverged("fsdp2", 0), make_record("ddp", 0)]
    evidence = replace(make_evidence(make_records(["fsdp2", "ddp"], 1)), records=records)
    assert report_sections(evidence)
    assert "fsdp2 diverged at step 7" in answer(evidence).warnings[0]


def test_a_run_that_diverged_has_no_quality_though_its_weights_are_finite():
    """Updates are left out from a step on, so that its model is that of the step before."""
    lost = [make_record("ddp", seed, diverged_at=7, steps=10) for seed in range(3)]
    assert all(record.val_ppl and record.val_loss for record in lost)
    evidence = make_evidence([*make_records(["fsdp2"]), *lost])
    row = evidence.compared.loc["ddp"]
    quality = "train_loss", "val_loss", "val_ppl", "val_bits_per_byte", "untrained_factor"
    assert row[[*quality, "ppl_ratio", "ppl_ratio_high"]].isna().all()
    assert row[["step_ms_mean", "bytes_wire", "untrained_ppl"]].notna().all()
    shown = comparison_rows(evidence.compared)[1]
    assert (shown["val_ppl"], shown["val_bits_per_byte"]) == (None, None)


def test_a_perplexity_beyond_the_largest_number_is_infinite():
    records = [*make_records(["fsdp2"]), *(make_record("ddp", s, val_ppl=None) for s in range(3))]
    table = comparison_table(make_evidence(records))
    assert any("infinite" in row for row in table.rows)
    assert "infinite: beyond the largest number" in table.note


def test_a_disturbed_time_is_marked():
    records = make_records(["fsdp2", "ddp"])
    timed = [make_timed("two-ranks"), make_timed("two-ranks", "ddp", contention=BUSY)]
    evidence = make_evidence(records, timed=timed)
    table = comparison_table(evidence)
    for row in table.rows:
        assert any(cell.endswith(" †") for cell in row) == (row[0] == "ddp")
    assert "others used more than 20 % of its CPUs" in table.note
    assert "†: others used more than" in headline_markdown(evidence, answer(evidence))


def test_every_host_and_machine_is_named():
    records, timed = make_records(["fsdp2"]), make_timings()
    host = {**records[0].host, "cpu": "Another"}
    other = records[0].model_copy(update={"host": host, "run": "x"})
    evidence = make_evidence([*records, other], timed=timed)
    line = setting_line(evidence)
    for part in ("A processor made for tests, Another", "timing slow, 6 repetitions"):
        assert part in line
    assert environment(evidence).sentences == []
    far = timed[-1].model_copy(update={"timing": "far", "torch": "2.12.0"})
    (sentence,) = environment(make_evidence(records, timed=[*timed, far])).sentences
    assert sentence.startswith("Timings of 2 machines") and "far on " in sentence


@pytest.mark.parametrize("text", ["a|b <script> [x](http://y) `c` *d* _e_ ~f~ &g", "a\\_b \\\\ c"])
def test_a_terminal_shows_text_without_what_markdown_needs(text):
    assert unescape(escape(text)) == text


def test_markdown_escapes_text_and_a_row_has_one_cell_per_column():
    text = escape("a|b <script> [x](http://y)\n`c` *d* _e_")
    assert text == r"a\|b \<script\> \[x\](http://y) \`c\` \*d\* \_e\_"
    table = make_table("t", ["a", "b"], [["a|b", "c"]])
    for line in table.markdown().splitlines():
        assert line.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figure(0), "0"),
        (figure(0.01234), "0.0123"),
        (figure(12345.6), "12,346"),
        (figure(-0.0001), "−0.000100"),  # noqa: RUF001
        (number(1e8, "bit/s"), "100 Mbit/s"),
        (number(2.5e9, "bit/s"), "2.5 Gbit/s"),
        (number(999_600), "1 M"),
        (rough(17_123), "17000"),
        (rough(0.98), "0.98"),
        (rough(1.02), "1"),
        (rough(3.04e-7), "0.0000003"),
        (plus_minus(48.31, 0.57), "48.3 ± 0.6"),
        (plus_minus(48.31, math.nan), "48.3"),
        (scientific(2.1e-8), "2e−8"),  # noqa: RUF001
        (percent(None), ABSENT),
    ],
)
def test_numbers_have_significant_digits_and_units(text, expected):
    assert text == expected


def test_facts_flatten_nested_values():
    tree = {"a_b": 1200, "c": {"d": 0.5, "e": ["x", "y"]}, "f": None}
    assert flatten(tree) == [("a b", "1,200"), ("c · d", "0.5000"), ("c · e", "x, y"), ("f", "–")]  # noqa: RUF001


def test_the_forecast_names_what_it_was_fitted_on_and_its_largest_errors_first():
    fitted = ["two-ranks/fsdp2", "two-ranks/ddp", f"two-ranks/{NO_COMMUNICATION}"]
    predicted = make_forecast(["fsdp2", "ddp", "fsdp2-int8"], fitted_on=fitted)
    text = accuracy(predicted)
    assert text.startswith("The model is fitted on 2 timed runs and 1 no-communication bound ")
    errors = dict(zip(("fsdp2", "ddp", "fsdp2-int8"), (0.5, 0.1, -0.4), strict=True))
    checks = [check.model_copy(update={"error": errors[check.run]}) for check in predicted.checks]
    evidence = make_evidence(
        make_records(["fsdp2"]), predicted=predicted.model_copy(update={"checks": checks})
    )
    [table] = tables_of([forecast(evidence)])
    # fsdp2 was not held out
    assert [row[0] for row in table.rows] == ["fsdp2-int8", "ddp"]
