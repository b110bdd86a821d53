import math

import pytest

from shardlab.report.aggregate import comparison
from shardlab.report.answer import answer
from shardlab.report.numbers import ABSENT, figure, plus_minus, scientific
from shardlab.report.summary import comparison_rows, summary
from shardlab.report.tables import (
    escape,
    facts,
    headline_markdown,
    run_tables,
    seed_warning,
    setting_line,
)
from tests.evidence_factory import make_evidence
from tests.record_factory import BASELINE, STRATEGIES, make_record, make_records


def _tables(records, runs=None):
    return run_tables(comparison(records, runs or list(STRATEGIES), BASELINE), records, BASELINE)


def test_every_table_has_every_run():
    for table in _tables(make_records()).values():
        assert [row[0] for row in table.rows] == list(STRATEGIES)
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert [table.rows[number][0] for number in table.highlighted] == [BASELINE]


def test_strategy_is_told_in_words():
    rows = {row[0]: row[1] for row in _tables(make_records())["comparison"].rows}
    assert rows["fsdp2-topk"] == "fsdp2, topk:density=0.05, error feedback"
    assert rows["fsdp2-exchange"] == "fsdp2, none, exchange"


def test_diverged_run_says_so():
    records = make_records(["fsdp2"])
    records += [make_record("ddp", seed, val_ppl=math.inf) for seed in range(3)]
    compared = comparison(records, ["fsdp2", "ddp"], BASELINE)
    row = run_tables(compared, records, BASELINE)["headline"].rows[1]
    assert "not finite" in " ".join(row)
    assert any("diverged" in sentence for sentence in answer_of(records, ["fsdp2", "ddp"]))
    assert comparison_rows(compared)[1]["val_ppl"] is None


def answer_of(records, runs):
    return answer(comparison(records, runs, BASELINE), BASELINE, make_evidence(records).history)


def test_answer_claims_no_more_than_the_interval():
    def said(times):
        records = [make_record(seed=seed, step_ms_mean=50.0 + seed) for seed in range(3)]
        records += [make_record("ddp", seed, step_ms_mean=t) for seed, t in enumerate(times)]
        return answer_of(records, ["fsdp2", "ddp"])[0]

    assert "not shown to be faster" in said([30.0, 51.0, 60.0])
    clear = said([40.0, 40.9, 41.6])
    assert clear.startswith("ddp has the shortest step")
    assert "not shown" not in clear
    assert said([60.0, 61.0, 62.0]).startswith("No run has a shorter mean step")


def test_an_engines_gain_is_not_credited_to_the_codec():
    records = [
        make_record(run, seed) for run in ("fsdp2", "fsdp2-int8", "ddp-int8") for seed in range(3)
    ]
    sentence = answer_of(records, ["fsdp2", "fsdp2-int8", "ddp-int8"])[1]
    assert sentence.startswith("Of 1 fsdp2 runs with a codec, 0 took a shorter step")
    assert "No fsdp2 run other" in answer_of(records, ["fsdp2", "ddp-int8"])[1]


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_are_announced(seeds):
    records = make_records(seeds=seeds)
    text = headline_markdown(_tables(records)["headline"], records)
    assert f"Fewer than 3 seeds ({seeds})" in text.replace("\\", "")


def test_enough_seeds_need_no_warning():
    assert seed_warning(make_records()) is None


def test_setting_names_every_host_that_took_part():
    records = make_records(["fsdp2"])
    other = records[0].model_copy(
        update={"host": {**records[0].host, "cpu": "Another"}, "run": "x"}
    )
    line = setting_line([*records, other])
    assert "A processor made for tests, Another" in line
    for part in ("seeds 0, 1, 2", "60 steps", "tiny", "wikipedia", "2.13.0", "4e41bc4d1a2b"):
        assert part in line


def test_markdown_shows_text_as_itself():
    text = escape("a|b <script> [x](http://y)\n`c` *d* _e_")
    assert "\n" not in text
    assert "\\|" in text
    assert "\\<script\\>" in text
    assert "\\[x\\](" in text


def test_markdown_row_has_one_cell_per_column():
    records = [make_record("a|b", seed) for seed in range(3)] + make_records(["fsdp2"])
    table = _tables(records, ["a|b", "fsdp2"])["headline"]
    for line in table.markdown().splitlines():
        assert line.replace("\\|", "").count("|") == len(table.columns) + 1


def test_summary_holds_plain_numbers_of_every_run():
    records = make_records()
    value = summary(comparison(records, list(STRATEGIES), BASELINE), make_evidence(records).history)
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


def test_facts_reach_every_leaf():
    tree = {"a_b": 1200, "c": {"d": 0.5, "e": ["x", "y"]}, "f": None}
    assert facts(tree) == [("a b", "1,200"), ("c · d", "0.5000"), ("c · e", "x, y"), ("f", "–")]  # noqa: RUF001


def test_memory_is_compared_with_the_estimate_that_there_is():
    estimates = {"memory_growth_bytes": 60, "memory_closed_form_bytes": 20}
    records = [
        make_record("fsdp2", memory_estimate_bytes=30, **estimates),
        make_record("ddp", memory_estimate_bytes=None, **estimates),
    ]
    compared = comparison(records, ["fsdp2", "ddp"], BASELINE)
    assert compared["memory_ratio"].to_list() == [2.0, 3.0]


def test_a_loss_that_a_seed_did_not_reach_has_no_mean():
    def reached(seed, steps):
        return make_record(seed=seed, steps_to_quality={"6.4": steps}, time_to_quality_s={"6.4": 1})

    both = _tables([reached(0, 30.0), reached(1, 40.0)], [BASELINE])["reached"]
    assert both.columns[1].heading == "to a loss of 6.4, steps" and both.rows[0][1] == "35.0"
    assert _tables([reached(0, 30.0), reached(1, None)], [BASELINE])["reached"].rows[0][1] == ABSENT


def test_without_thresholds_nothing_is_told_of_them():
    fields = ("steps_to_quality", "time_to_quality_s", "quality_at_time")
    records = [make_record(seed=seed, **{key: {} for key in fields}) for seed in range(3)]
    assert "reached" not in _tables(records, [BASELINE])
