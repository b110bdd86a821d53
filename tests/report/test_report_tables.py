import math

import pytest

from shardlab.report.aggregate import seed_warning
from shardlab.report.answer import answer
from shardlab.report.numbers import (
    ABSENT,
    figure,
    plain,
    plus_minus,
    scientific,
    spread,
    where_known,
)
from shardlab.report.sections.appendix import setting_line
from shardlab.report.sections.measures import time_to_quality
from shardlab.report.sections.runs import comparison, headline_table
from shardlab.report.tables import escape, facts, tables_of, text_table
from shardlab.report.write import comparison_rows, report_sections, summary
from tests.evidence_factory import make_evidence
from tests.record_factory import BASELINE, STRATEGIES, make_record, make_records


def test_every_table_of_runs_has_every_run():
    tables = [t for t in tables_of(report_sections(make_evidence(make_records()))) if t.highlighted]
    of_matrix = [t for t in tables if "no communication" not in {row[0] for row in t.rows}]
    assert len(of_matrix) >= 7
    for table in of_matrix:
        assert [row[0] for row in table.rows] == list(STRATEGIES)
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert [table.rows[number][0] for number in table.highlighted] == [BASELINE]


def test_a_heading_has_one_meaning_on_the_page():
    meanings = {}
    for table in tables_of(report_sections(make_evidence(make_records()))):
        for column in table.columns:
            if column.meaning:
                meanings.setdefault(column.heading, set()).add(column.meaning)
    assert [heading for heading, texts in meanings.items() if len(texts) > 1] == []


def test_number_cells_share_one_signature():
    row = {"a": 2e6, "a_sd": 1e5, "none": math.nan}
    cells = [helper("a", digits=4, scale=1e-6)(row) for helper in (plain, where_known, spread)]
    assert cells == ["2.000", "2.000", "2.000 ± 0.100"]
    assert where_known("none", scale=1e-6)(row) == ABSENT


def test_marks_are_explained_below_the_table():
    assert "not applicable" in text_table("a", ["b"], [[ABSENT]]).note
    assert not text_table("a", ["b"], [["c"]]).note


def test_strategy_is_shown_by_its_label():
    (table,) = comparison(make_evidence(make_records())).tables
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["fsdp2-topk"] == "fsdp2, topk:density=0.05, error feedback"
    assert rows["fsdp2-exchange"] == "fsdp2, none, exchange"


def test_diverged_run_is_marked():
    records = make_records(["fsdp2"])
    records += [make_record("ddp", seed, val_ppl=math.inf) for seed in range(3)]
    evidence = make_evidence(records)
    table = headline_table(evidence)
    assert "not finite" in " ".join(table.rows[1])
    assert "not finite: the run diverged" in table.note
    assert any("diverged" in sentence for sentence in answer(evidence))
    assert comparison_rows(evidence.compared)[1]["val_ppl"] is None


def test_answer_claims_no_more_than_the_interval():
    def said(times):
        records = [make_record(seed=seed, step_ms_mean=50.0 + seed) for seed in range(3)]
        records += [make_record("ddp", seed, step_ms_mean=t) for seed, t in enumerate(times)]
        return answer(make_evidence(records))[0]

    assert "not shown to be faster" in said([30.0, 51.0, 60.0])
    clear = said([40.0, 40.9, 41.6])
    assert clear.startswith("ddp has the shortest step")
    assert "not shown" not in clear
    assert said([60.0, 61.0, 62.0]).startswith("No run has a shorter mean step")


def test_speed_up_of_another_engine_is_not_credited_to_the_codec():
    records = [
        make_record(run, seed) for run in ("fsdp2", "fsdp2-int8", "ddp-int8") for seed in range(3)
    ]
    sentence = answer(make_evidence(records))[1]
    assert sentence.startswith("Of 1 fsdp2 runs with a codec, 0 had a shorter step")
    others = [record for record in records if record.run != "fsdp2-int8"]
    assert "No fsdp2 run other" in answer(make_evidence(others))[1]


def test_enough_seeds_need_no_warning():
    assert seed_warning(make_records()) is None


def test_setting_names_every_host():
    records = make_records(["fsdp2"])
    other = records[0].model_copy(
        update={"host": {**records[0].host, "cpu": "Another"}, "run": "x"}
    )
    line = setting_line([*records, other])
    assert "A processor made for tests, Another" in line
    for part in ("seeds 0, 1, 2", "60 steps", "tiny", "wikipedia", "2.13.0", "4e41bc4d1a2b"):
        assert part in line


def test_markdown_escapes_text():
    text = escape("a|b <script> [x](http://y)\n`c` *d* _e_")
    assert "\n" not in text
    assert "\\|" in text
    assert "\\<script\\>" in text
    assert "\\[x\\](" in text


def test_markdown_row_has_one_cell_per_column():
    records = [make_record("a|b", seed) for seed in range(3)] + make_records(["fsdp2"])
    table = headline_table(make_evidence(records))
    for line in table.markdown().splitlines():
        assert line.replace("\\|", "").count("|") == len(table.columns) + 1


def test_summary_holds_plain_numbers_of_every_run():
    value = summary(make_evidence(make_records()))
    assert list(value["runs"]) == list(STRATEGIES)
    assert all(isinstance(n, float) for run in value["runs"].values() for n in run.values())
    assert value["agent"]["rounds"] == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (48.31, "48.3"), (12345.6, "12,346"), (-0.0001, "−0.000100")],  # noqa: RUF001
)
def test_figures_have_three_digits(value, text):
    assert figure(value) == text


def test_mean_and_deviation_share_their_decimals():
    assert plus_minus(48.31, 0.57) == "48.3 ± 0.6"
    assert plus_minus(48.31, math.nan) == "48.3"
    assert scientific(2.1e-8) == "2e−8"  # noqa: RUF001


def test_facts_flatten_nested_values():
    tree = {"a_b": 1200, "c": {"d": 0.5, "e": ["x", "y"]}, "f": None}
    assert facts(tree) == [("a b", "1,200"), ("c · d", "0.5000"), ("c · e", "x, y"), ("f", "–")]  # noqa: RUF001


def test_loss_not_reached_by_a_seed_has_no_mean():
    def reached(seed, steps):
        return make_record(seed=seed, steps_to_quality={"6.4": steps}, time_to_quality_s={"6.4": 1})

    def table(records):
        (found,) = time_to_quality(make_evidence(records)).tables
        return found

    both = table([reached(0, 30.0), reached(1, 40.0)])
    assert both.columns[1].heading == "to loss 6.4, steps"
    assert both.rows[0][1] == "35.0"
    assert table([reached(0, 30.0), reached(1, None)]).rows[0][1] == ABSENT


def test_time_to_quality_is_omitted_without_thresholds():
    fields = ("steps_to_quality", "time_to_quality_s", "quality_at_time")
    records = [make_record(seed=seed, **{key: {} for key in fields}) for seed in range(3)]
    evidence = make_evidence(records)
    assert time_to_quality(evidence) is None
    assert "Time to quality" not in [s.title for s in report_sections(evidence)]
