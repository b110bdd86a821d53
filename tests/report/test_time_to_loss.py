"""Time to one loss: steps from losses, times from timings, and what competes with what."""

import math
import re
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT
from shardlab.report.answer import answer
from shardlab.report.evidence import Evidence
from shardlab.report.loss_times import Comparison, compare_links, links_of, ways_of
from shardlab.report.sections.time_to_loss import (
    lengths_table,
    time_to_loss,
    times_table,
    tuning_table,
    use_table,
)
from shardlab.report.tuned import Tuned, length_at
from shardlab.report.write import headline_markdown, write_report
from shardlab.results.files import read_timings, write_results
from shardlab.results.interval import paired_ratio
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import turns
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from stages.report import tuned_of
from stages.sections import Sections
from tests.commands import ROOT
from tests.evidence_factory import make_evidence
from tests.record_factory import make_records
from tests.timed_run_factory import make_timed
from tests.tuned_factory import EQUAL, METHODS, STRATEGIES, make_rows, make_steps, make_tuned

DDP, BF16, INT4, ALONE = [200.0, 220.0], [150.0, 165.0], [120.0, 132.0], [160.0, 176.0]
STEPS = {"ddp": DDP, "ddp-bf16": BF16, "ddp-int4": INT4, "rare": [130.0, 143.0], "alone": ALONE}
TURNS = {"slow": "slow", "slow-alone": "slow", "fast": "fast", "fast-alone": "fast"}
ALL = tuple(make_rows(name, EQUAL | {(1, 2000): 3.0}) for name in METHODS)


def one_link(tuned: Tuned, timed: list[TimingResult] | None = None) -> Comparison:
    (comparison,) = compare_links(timed or make_steps(STEPS), TURNS, tuned)
    return comparison


def make(tuned: Tuned, timed: list[TimingResult] | None = None) -> Evidence:
    """Evidence with a timing of four ranks, too, for which nothing was tuned."""
    four = [make_timed("four", run, 4) for run in ("ddp", NO_COMMUNICATION)]
    runs = [*(timed or make_steps(STEPS)), *four]
    records = make_records(["ddp"])
    return make_evidence(records, "ddp", timed=runs, turns=TURNS, tuned=tuned, comparison="slow")


def test_lengths_are_interpolated_in_log_steps() -> None:
    losses = {4000: 2.0, 1000: 4.0, 2000: 3.0}
    half = length_at(3.5, losses)
    assert half is not None
    assert half.steps == pytest.approx(1000 * math.sqrt(2))
    # a nat doubles the steps here
    assert half.per_nat == pytest.approx(math.log(2))
    assert length_at(1.9, losses) is None
    assert length_at(4.1, losses) is None


@pytest.mark.parametrize("shared", [1400, 2000])
def test_a_seed_with_a_higher_loss_takes_longer(shared: int) -> None:
    """Whichever of the two lengths it has: between them a nat is a factor of 10 / 7."""
    losses = {(0, 1400): 3.5, (0, 2000): 2.5, (1, shared): {1400: 3.7, 2000: 2.7}[shared]}
    (stock, *_) = make_tuned(make_rows("stock", losses)).curves
    assert stock.steps[0] == pytest.approx(math.sqrt(1400 * 2000))
    assert stock.steps[1] / stock.steps[0] == pytest.approx((10 / 7) ** 0.2)


def test_the_best_setting_of_the_first_seed_and_length_counts() -> None:
    tuned = make_tuned(
        make_rows("stock", EQUAL),
        make_rows("stock", {(0, 2000): 3.1, (1, 2000): 1.0, (0, 2800): 1.0}, rate=0.0045),
        # it diverged
        make_rows("stock", {(0, 2000): None}, rate=0.002),
    )
    curve = tuned.curves[0]
    assert curve.best == (0.003, (0.9, 0.95))
    assert curve.steps == {0: 2000}
    assert curve.tries[0.002, (0.9, 0.95)] == math.inf
    assert not curve.unbracketed


@pytest.mark.parametrize(
    "rates, words",
    [
        ({0.003: 3.0}, ["not all neighbours were tried"]),
        ({0.003: 3.1, 0.0045: 3.0}, ["the learning rate is at an end of the grid"]),
        ({}, ["nothing was tried"]),
    ],
)
def test_what_the_search_left_open_is_said(rates: dict[float, float], words: list[str]) -> None:
    rows = [make_rows("stock", {(0, 2000): loss}, rate=rate) for rate, loss in rates.items()]
    tuned = make_tuned(*rows)
    assert tuned.curves[0].unbracketed == words
    assert words[0] in tuning_table(tuned).rows[0]


def test_gains_are_of_steps_in_pairs_of_seeds_and_of_times_in_pairs_of_repetitions() -> None:
    nats = [0.5, 0.7, 0.4]
    losses = {(seed, 2000): 3 + nat for seed, nat in enumerate(nats)} | {(0, 2800): 2.5}
    stock = EQUAL | {(1, 2000): 3.0, (2, 2000): 3.0}
    tuned = make_tuned(make_rows("stock", stock), make_rows("int4", losses))
    comparison = one_link(tuned)
    ways = {way.title: way for way in comparison.order}
    gain = comparison.link.gain(ways["ddp-int4/2"], ways["ddp/2"])
    steps = paired_ratio([1.4**-nat for nat in nats], [1.0] * 3)
    assert gain == pytest.approx(steps.times(paired_ratio(DDP, INT4)))
    assert comparison.link.seconds(ways["ddp/2"]) == pytest.approx(2 * math.sqrt(200 * 220))


def test_one_device_trains_what_a_method_without_loss_trains_in_each_step() -> None:
    """So its gain is that of a step, and has an interval with one seed, too."""
    comparison = one_link(make_tuned(make_rows("stock", EQUAL)))
    ways = {way.title: way for way in comparison.order}
    assert {*ways} == {"ddp/2", "ddp-bf16/2", "one device/2"}
    gain = comparison.link.gain(ways["ddp/2"], ways["one device/2"])
    assert gain == pytest.approx(paired_ratio(ALONE, DDP))
    assert comparison.link.ratio == pytest.approx(math.sqrt(2.0 * 2.2) - 1)


def test_kinds_follow_from_what_is_trained() -> None:
    methods = {**METHODS, "small": {"strategies": ["ddp"], "world_size": 1}}
    ways = ways_of(make_tuned(methods=methods))
    assert {way.title: way.family for way in ways} == {
        "one device/2 (stock)": "one device",
        "ddp/2": "stock torch",
        "ddp-bf16/2": "stock torch",
        "ddp-int4/2": "compressed steps",
        "rare/2": "parameter synchronisation",
        "one device/2 (small)": "one device",
    }


def test_what_had_no_tries_of_its_own_is_listed_and_does_not_compete() -> None:
    """Numbers of micro-batches that another method of the same strategy has are no less."""
    methods = {
        **METHODS,
        "int4": {"strategies": ["ddp-int4"], "learning_rates": [0.003]},
        "small": {"strategies": ["ddp"], "world_size": 1, "micro_batches": [1]},
    }
    tuned = make_tuned(*ALL, methods=methods, tune={"micro_batches": {1: 1, 2: 1}})
    assert [curve.less for curve in tuned.curves] == [[], ["learning_rates"], [], []]
    comparison = one_link(tuned)
    assert "ddp-int4/2" not in {way.title for way in comparison.order}
    rows = {row[0]: row for row in times_table(ways_of(tuned), [comparison.link]).rows}
    assert rows["ddp-int4/2"][-1] == "listed only: learning_rates"
    assert rows["rare/2"][-1] == ABSENT
    rows = {row[0]: row for row in tuning_table(tuned).rows}
    assert rows["int4/2"][-1] == "listed only: learning_rates"
    assert rows["small/1"][-1] == ABSENT


def test_a_gain_over_what_had_fewer_micro_batches_is_marked() -> None:
    methods = {**METHODS, "rare": {**METHODS["rare"], "micro_batches": [2]}}
    tuned = make_tuned(*ALL, methods=methods, tune={"micro_batches": {2: 1, 8: 1}})
    (row,) = use_table([one_link(tuned)], tuned).rows
    assert "1.08 rare/2: tuned over less" in row


def test_the_first_is_compared_with_the_first_of_every_other_kind() -> None:
    tuned = make_tuned(*ALL)
    (row,) = use_table([one_link(tuned)], tuned).rows
    assert row[1:3] == ["100mbit", "ddp-int4/2"]
    cells = dict(zip([c.title for c in use_table([], tuned).columns], row, strict=True))
    assert cells["gain over compressed steps"] == ABSENT
    assert cells["gain over stock torch"] == "1.25 ddp-bf16/2"
    assert cells["gain over parameter synchronisation"] == "1.08 rare/2"
    assert cells["gain over one device"] == "1.33 one device/2"
    assert cells["perplexity after equal tokens"] == "1.000"


def test_a_gain_whose_interval_holds_1_is_not_told_apart() -> None:
    tuned = make_tuned(*ALL)
    timed = make_steps({**STEPS, "ddp-int4": [120.0, 170.0], "rare": [130.0, 130.0]})
    (row,) = use_table([one_link(tuned, timed)], tuned).rows
    assert any(cell.endswith(": not told apart") for cell in row)


def test_steps_of_a_warm_up_take_their_time() -> None:
    methods = {**METHODS, "warm": {"strategies": ["rare-warm"]}}
    tuned = make_tuned(make_rows("stock", EQUAL), make_rows("warm", EQUAL), methods=methods)
    comparison = one_link(tuned, make_steps({**STEPS, "rare": [104.0, 104.0]}))
    ways = {way.title: way for way in comparison.order}
    # 200 of the 2,000 steps are those of ddp-int4, the others those of rare
    steps_ms = [0.1 * first + 0.9 * 104.0 for first in INT4]
    expected = 2 * math.sqrt(math.prod(steps_ms))
    assert comparison.link.seconds(ways["rare-warm/2"]) == pytest.approx(expected)


def test_steps_of_other_micro_batches_are_those_of_their_own_timing() -> None:
    four = {"ddp": [400.0] * 2, "alone": [500.0] * 2}
    losses = {(0, 350): 4.0, (0, 500): 3.0}
    tuned = make_tuned(
        make_rows("stock", EQUAL),
        make_rows("stock", losses, 8),
        tune={"micro_batches": {2: 1, 8: 1}},
    )
    timed = [*make_steps(STEPS), *make_steps(four, parts=4)]
    link = one_link(tuned, timed).link
    minutes = {row[0]: row[2] for row in times_table(ways_of(tuned), [link]).rows}
    assert minutes["ddp/8"] == "3.33" and minutes["one device/8"] == "4.17"
    assert "ddp-bf16/8" not in minutes


def test_repetitions_in_which_the_machine_paused_do_not_count() -> None:
    timed = make_steps({"ddp": [200.0, 200.0, 90_000.0, 200.0]})
    (link,) = links_of(timed, TURNS, make_tuned(make_rows("stock", EQUAL)))
    ways = ways_of(make_tuned(make_rows("stock", EQUAL)))
    (row,) = times_table(ways, [link]).rows
    assert row[2] == "6.67"  # 2,000 steps of 200 ms


def test_links_stand_from_fast_to_slow_and_one_device_is_that_of_their_turns() -> None:
    tuned = make_tuned(*ALL)
    fast = make_steps({**STEPS, "ddp": [110.0, 110.0], "alone": [200.0, 200.0]}, "fast")
    links = links_of([*make_steps(STEPS), *fast], TURNS, tuned)
    assert [link.name for link in links] == ["1000mbit", "100mbit"]
    alone = next(way for way in ways_of(tuned) if way.ranks == 1)
    assert [link.step_ms(alone)[0] for link in links] == [200.0, 160.0]
    # without the baseline nothing says what synchronisation takes
    rare = make_steps({"rare": [130.0, 143.0]})
    assert links_of(rare, TURNS, tuned) == []


def test_perplexity_is_compared_after_equal_tokens_by_length() -> None:
    tuned = make_tuned(
        make_rows("stock", EQUAL | {(1, 2000): 3.1, (0, 2800): 2.5}),
        make_rows("int4", {(0, 2000): 3.1, (1, 2000): 3.2, (2, 2000): 9.0, (0, 2800): 2.5}),
    )
    (int4,) = lengths_table(tuned).rows
    assert int4[:2] == ["int4/2", ABSENT] and int4[3] == "1.000"
    assert int4[2] == "1.105"
    assert tuned.curves[1].mean_bytes() == 1e3


def test_a_loss_that_no_method_reaches_is_said_first() -> None:
    tuned = make_tuned(make_rows("stock", {(0, 1400): 4.0, (0, 2000): 3.5}))
    answered = answer(make(tuned))
    assert answered.warnings[0] == (
        "No method has tune.target_loss (3) between two of its lengths, so that nothing is "
        "compared by the time to it: the lowest is 3.5, of stock, the highest 4, of stock."
    )
    assert headline_markdown(make(tuned), answered).startswith("No method has tune.target\\_loss")
    assert tuning_table(tuned).rows[0][8] == "not reached"
    assert answer(make(make_tuned(*ALL))).warnings[:1] != answered.warnings[:1]


@pytest.mark.parametrize("shorter", [2.9, None])
def test_a_method_that_reaches_the_loss_too_soon_to_be_compared_is_said_first(
    shorter: float | None,
) -> None:
    """It may be what to use: its shorter run had the loss already, or no finite loss."""
    soon = {(0, 2000): 2.8, (0, 1400): shorter}
    tuned = make_tuned(make_rows("stock", EQUAL), make_rows("int4", soon))
    assert answer(make(tuned)).warnings[0] == (
        "int4/2 has tune.target_loss in its shortest run, and may be sooner at it than all that is "
        "compared: lower tune.target_loss, or raise tune.lengths."
    )
    assert tuning_table(tuned).rows[1][8] == "reached in the shortest"
    listed = {**METHODS, "int4": {**METHODS["int4"], "learning_rates": [0.003]}}
    restricted = make_tuned(make_rows("stock", EQUAL), make_rows("int4", soon), methods=listed)
    assert "int4/2" not in str(answer(make(restricted)).warnings)


def test_where_each_method_is_tuned_over_less_nothing_is_compared_and_that_is_said() -> None:
    methods = {"stock": {**METHODS["stock"], "learning_rates": [0.003]}}
    section = time_to_loss(make(make_tuned(make_rows("stock", EQUAL), methods=methods)))
    assert section is not None
    assert section.notes == [
        "No time to the loss is compared: each method that reaches it is tuned over less than tune "
        "says."
    ]


def test_the_page_says_what_to_use_on_links_whose_time_to_the_loss_is_known() -> None:
    evidence = make(make_tuned(*ALL))
    lines = answer(evidence).lines
    assert lines[0].startswith("100mbit, synchronisation / computation 1.1")
    assert ": use ddp-int4/2, " in lines[0] and "as soon at the loss as one device" in lines[0]
    # by steps only where that is not known
    assert not any("at 100 Mbit/s" in line for line in lines)
    assert any(line.startswith("4 ranks") for line in lines)
    assert "| 100mbit | ddp-int4/2 |" in headline_markdown(evidence, answer(evidence))


def test_the_section_is_the_first_of_the_page_with_its_plots(tmp_path: Path) -> None:
    write_report(make(make_tuned(*ALL)), tmp_path)
    tables = (tmp_path / "tables.md").read_text()
    assert re.findall("^## (.*)", tables, re.MULTILINE)[0] == "Time to one loss"
    assert {"gain.svg", "bytes.svg"} < {path.name for path in (tmp_path / "plots/svg").iterdir()}
    assert "ddp-int4/2" in (tmp_path / "report.html").read_text()


def test_what_was_not_timed_has_no_time_and_is_named() -> None:
    steps = {name: times for name, times in STEPS.items() if name != "rare"}
    section = time_to_loss(make(make_tuned(*ALL), make_steps(steps)))
    assert section is not None
    assert section.notes == ["Not timed, so that they have no time to the loss: rare/2."]
    assert "rare/2" not in {row[0] for row in section.tables[1].rows}


def test_one_device_that_trains_otherwise_has_steps_of_its_own() -> None:
    """Those without communication are of training that it does not do."""
    methods = {"stock": METHODS["stock"], "other": {"strategies": ["ddp-int4"], "world_size": 1}}
    tuned = make_tuned(make_rows("stock", EQUAL), make_rows("other", EQUAL), methods=methods)
    (way,) = (way for way in ways_of(tuned) if way.curve.name == "other")
    timed = make_steps(STEPS)
    assert (way.title, way.family) == ("ddp-int4/2", "one device")
    assert not one_link(tuned, timed).link.has(way)
    (own,) = (run for run in make_steps({"ddp-int4": INT4}) if run.run == "ddp-int4")
    alone = own.model_copy(update={"timing": "slow-alone", "world_size": 1, "accumulation": 2})
    assert one_link(tuned, [*timed, alone]).link.step_ms(way) == INT4


def test_an_experiment_that_tunes_nothing_has_no_such_section() -> None:
    assert time_to_loss(make_evidence(make_records(["ddp"]), "ddp")) is None


def test_no_committed_gain_over_one_device_exceeds_the_number_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    params, results = Sections("params/islands.yaml"), Path("experiments/islands/results")
    timings = params("timings", dict[str, Timing])
    timed = only(read_timings(results / "timings", timings), TimingResult)
    tuned = tuned_of(params, results)
    assert tuned is not None and tuned.reached
    compared = compare_links(timed, turns(timings), tuned)
    assert len(compared) == 5
    for comparison in compared:
        assert all(gain.ratio <= 2 for gain in comparison.over_one_device().values())


@pytest.mark.parametrize("change", [{"run": "former"}, {"strategy_hash": "0" * 16}])
def test_rows_of_another_method_are_refused(tmp_path: Path, change: dict[str, str]) -> None:
    """As of a file that was copied, or that --set made."""
    methods = "methods={stock: {strategies: [ddp]}}"
    tune = "tune={target_loss: 3, learning_rates: [0.003], micro_batches: {2: 1}}"
    timed = "timed_strategies={ddp: {engine: ddp}}"
    params = Sections(ROOT / "params/quick.yaml", [methods, tune, timed])
    rows = make_rows("stock", EQUAL, strategy_hash=STRATEGIES["ddp"].hash())
    path = tmp_path / "tune/stock.jsonl"
    write_results(path, rows)
    tuned = tuned_of(params, tmp_path)
    assert tuned is not None and tuned.rows == rows
    write_results(path, [*rows[:1], rows[1].model_copy(update=change)])
    with pytest.raises(UserError, match=r"has other runs than methods\.stock: run shardlab tune "):
        tuned_of(params, tmp_path)
