"""Timings: paired over repetitions, relative to one rank and to the bound, and by link."""

import math
import random
from pathlib import Path

import pandas as pd
import pytest

from shardlab.core.numbers import ABSENT, number
from shardlab.report.columns import STEP
from shardlab.report.sections.links import (
    all_timings,
    codec_table,
    crossing,
    links,
    stops_paying,
    time_to_quality,
)
from shardlab.report.sections.runs import comparison_table
from shardlab.report.sections.scaling import cores_note, scaling, share
from shardlab.report.settings import Quality
from shardlab.report.tables import (
    DISTURBED,
    ONE_DEVICE,
    PAUSED,
    RUN,
    make_table,
    tables_of,
)
from shardlab.report.timings import crossovers, group_title, link_headings, timing_table
from shardlab.report.write import write_report
from shardlab.results.contention import Contention
from shardlab.results.files import read_results
from shardlab.results.table import ratio_to
from shardlab.results.timing_result import NO_COMMUNICATION, scaling_efficiency
from shardlab.strategy.document import parse_strategy
from tests.evidence_factory import make_evidence
from tests.record_factory import BASELINE, BUSY, STRATEGIES, make_record, make_records
from tests.timed_run_factory import make_timed, make_timings

DRIFT = [20.0, 40.0, 25.0, 90.0]
QUALITY = Quality(train_loss=(7.0, 1.0), time_s=(2.0,))


def pair(times: float):
    """The baseline and its no-communication bound, so many times as fast in every repetition."""
    return [
        make_timed(run=BASELINE, step_ms=[times * step for step in DRIFT]),
        make_timed(run=NO_COMMUNICATION, step_ms=DRIFT),
    ]


def row_of(timed, run=BASELINE, timing="slow"):
    table = timing_table(timed, BASELINE)
    return table[(table["run"] == run) & (table["timing"] == timing)].iloc[0]


def timed(rate, ranks=2, delay=0.0, **steps):
    """A timing on a link with given steps by run."""
    names = {"int8": "fsdp2-int8", "exchange": "fsdp2-exchange", "none": NO_COMMUNICATION}
    facts = {"bits_per_second": int(rate), "delay_ms": delay, "link": number(rate, "bit/s")}
    return [
        make_timed(
            f"at {rate} {ranks} {delay}", names.get(run, run), ranks, step_ms=step_ms, **facts
        )
        for run, step_ms in steps.items()
    ]


def groups_of(timed):
    return crossovers(timing_table(timed, BASELINE))


def test_tokens_are_of_all_ranks_and_micro_batches():
    row = row_of([make_timed(step_ms=[30.0, 40.0, 50.0], accumulation=4)])
    assert row["tokens_per_s"] == pytest.approx(2 * 4 * 8 * 64 / 0.04)
    assert (row["step_ms"], row["step_ms_sd"]) == (40.0, 10.0)


def test_efficiency_is_throughput_per_rank_against_one_rank():
    alone = make_timed("one-rank", world_size=1, step_ms=[30.0])
    four = make_timed("four-ranks", world_size=4, step_ms=[40.0])
    row = row_of([alone, four], timing="four-ranks")
    assert row["efficiency"] == pytest.approx(0.75)
    per_rank = row["tokens_per_s"] / 4
    assert per_rank / row_of([alone], timing="one-rank")["tokens_per_s"] == pytest.approx(0.75)
    assert math.isnan(row_of([four], timing="four-ranks")["efficiency"])
    fewer = four.model_copy(update={"batch_size": 2})
    assert row_of([alone, fewer], timing="four-ranks")["efficiency"] == pytest.approx(0.75 / 4)


def test_steps_are_compared_with_those_of_as_many_micro_batches():
    """Efficiency, and one device alone; sections but the last two show those of training."""
    timed = [
        make_timed(f"{name}-{parts}", run, ranks, step_ms=[ms * parts] * 2, accumulation=parts)
        for parts in (4, 1)
        for name, ranks, ms in (("one-rank", 1, 30.0), ("two-ranks", 2, 40.0 / parts))
        for run in (BASELINE, NO_COMMUNICATION)
    ]
    turns = dict.fromkeys((run.timing for run in timed), "two-ranks-1")
    table = timing_table(timed, BASELINE, turns).set_index(["timing", "run"])
    for parts, step in ((1, 40.0), (4, 40.0)):
        row = table.loc[f"two-ranks-{parts}", BASELINE]
        assert row["efficiency"] == pytest.approx(30 * parts / step)
        assert row["alone_ratio"] == pytest.approx(step / (2 * 30 * parts))
    lone = [run for run in timed if run.timing != "one-rank-4"]
    table = timing_table(lone, BASELINE, turns).set_index(["timing", "run"])
    row = table.loc["two-ranks-4", BASELINE]
    assert math.isnan(row["efficiency"]) and math.isnan(row["alone_ratio"])

    evidence = make_evidence(make_records(), timed=timed, turns=turns, comparison="two-ranks-1")
    assert {*evidence.timing_rows["accumulation"]} == {1}
    assert [row["timing"].iloc[0] for row in evidence.several] == ["two-ranks-1"]
    table = all_timings(evidence).tables[0]
    headings = [column.title for column in table.columns]
    assert {row[headings.index("micro-batches")] for row in table.rows} == {"1", "4"}


def test_frame_headers_are_not_counted_as_interface_excess():
    run = make_timed(bytes_wire=1e6, interface_bytes=1.02e6 + 66 * 700, interface_frames=700.0)
    assert row_of([run])["interface_excess"] == pytest.approx(0.02)
    assert math.isnan(row_of([make_timed("two-ranks")], timing="two-ranks")["interface_excess"])
    # the interface of two ranks counts what both send to other nodes
    ledger = {kind: {**sums, "bytes_between_nodes": 2.5e5} for kind, sums in run.ledger.items()}
    node = run.model_copy(update={"timing": "nodes", "ranks_per_node": 2, "ledger": ledger})
    assert row_of([node], timing="nodes")["interface_excess"] == pytest.approx(0.02)
    assert [len(group) for group in groups_of([run, node])] == [1, 1]


def test_the_share_of_communication_is_stated_by_trace_and_by_steps():
    runs = pair(3.0)
    traced = {"profiled_step_ms": 100.0, "exposed_comm_ms": 60.0}
    breakdown = runs[0].breakdown.model_copy(update=traced)
    runs[0] = runs[0].model_copy(update={"breakdown": breakdown})
    (text,) = share(timing_table(runs, BASELINE), BASELINE)
    assert text == (
        "2 ranks at 100 Mbit/s: 60 % of the step of fsdp2 is communication (exposed, in the "
        "trace), 67 % with the cost of sharding."
    )
    (text,) = share(timing_table(runs[:1], BASELINE), BASELINE)
    assert "with the cost of sharding" not in text
    assert share(timing_table(runs[1:], BASELINE), BASELINE) == []


def in_turns(*timed):
    """The table of timings that took turns."""
    return timing_table(timed, BASELINE, {run.timing: "slow" for run in timed})


def test_one_device_alone_makes_as_many_of_its_own_steps_as_there_are_ranks():
    runs = pair(3.0)
    # one rank by itself is faster than one of two at once, and was timed twice as often
    halves = [0.75 * step for step in DRIFT for _ in range(2)]
    table = in_turns(*runs, make_timed("one-rank", NO_COMMUNICATION, 1, step_ms=halves))
    table = table[table["timing"] == "slow"]
    assert table["run"].tolist() == [ONE_DEVICE, BASELINE, NO_COMMUNICATION]
    alone, first, bound = (row for _, row in table.iterrows())
    assert alone["step_ms"] == pytest.approx(0.75 * 2 * bound["step_ms"])
    # the same tokens, in so much time
    assert alone["tokens_per_s"] * alone["step_ms"] == first["tokens_per_s"] * first["step_ms"]
    # paired by turns, in which the machine drifts
    ends = [f"alone_ratio{end}" for end in ("", "_low", "_high")]
    assert first[ends].tolist() == pytest.approx([3 / (0.75 * 2)] * 3)
    assert alone[ends].tolist() == [1] * 3
    assert alone["step_ratio"] == pytest.approx(0.5)
    assert math.isnan(alone["exposed_share"])
    # of a step with the same samples on any number of ranks, a single one
    fewer = [run.model_copy(update={"batch_size": 4}) for run in runs]
    table = in_turns(*fewer, make_timed("one-rank", NO_COMMUNICATION, 1, step_ms=halves))
    strong, first, bound = (row for _, row in table[table["timing"] == "slow"].iterrows())
    assert strong["step_ms"] == pytest.approx(0.75 * bound["step_ms"])
    assert strong["tokens_per_s"] * strong["step_ms"] == first["tokens_per_s"] * first["step_ms"]
    assert first["alone_ratio"] == pytest.approx(3 / 0.75)


def test_without_a_timing_of_one_device_nothing_is_compared_with_it():
    table = timing_table(pair(3.0), BASELINE)
    assert table["run"].tolist() == [BASELINE, NO_COMMUNICATION]
    assert table["alone_ratio"].isna().all()
    assert in_turns(make_timed("slow"))["run"].tolist() == [BASELINE]


@pytest.mark.parametrize("change", [{"threads": 2}, {"world_size": 4}])
def test_ranks_that_share_cores_are_compared_with_no_device_alone(change):
    single = make_timed("one-rank", NO_COMMUNICATION, 1)
    runs = [run.model_copy(update=change) for run in pair(3.0)]
    for table in (in_turns(*runs, single), timing_table(runs, BASELINE)):
        assert ONE_DEVICE not in {*table["run"]}
        assert table["alone_ratio"].isna().all()


def test_one_device_of_other_turns_or_on_a_link_is_none_of_this_timing():
    single = make_timed("one-rank", NO_COMMUNICATION, 1)
    alone = {"slow": "slow", "one-rank": "one-rank"}
    linked = make_timed("fast", NO_COMMUNICATION, 1)
    for table in (
        timing_table([*pair(3.0), single], BASELINE, alone),
        in_turns(*pair(3.0), linked),
    ):
        assert ONE_DEVICE not in {*table["run"]}
        assert table["alone_ratio"].isna().all()


def test_no_committed_gain_is_above_the_devices_that_made_it():
    """More than that is a sign of a device that was slowed down by others."""
    paths = [*Path("results/timings").glob("*.jsonl")]
    assert paths
    for path in paths:
        timed = read_results(path, "time it")
        rows = timing_table(timed, BASELINE, {run.timing: path.stem for run in timed})
        compared = rows.dropna(subset=["alone_ratio"])
        gains = 1 / compared["alone_ratio"]
        assert not compared.empty
        assert (gains <= compared["world_size"]).all()
        assert (gains * compared["threads"] <= compared["cores"]).all()


def test_what_is_no_strategy_is_the_first_row_of_tables_of_timings():
    records = make_records()
    evidence = make_evidence(records)
    for table in (comparison_table(evidence), scaling(evidence).tables[0]):
        assert table.rows[0][0] == ONE_DEVICE and table.pinned[0] == 0
    several = evidence.timing_rows.query("world_size > 1").groupby("timing")["run"].first()
    assert set(several) == {ONE_DEVICE}


def test_order_of_timings_does_not_matter():
    """As in params.yaml, where they are named."""
    runs = make_timings()
    by_name = sorted(runs, key=lambda run: run.timing)
    assert runs != by_name
    first, second = (
        [
            section(make_evidence(make_records(), timed=order)).markdown()
            for section in (scaling, links)
        ]
        for order in (runs, by_name)
    )
    assert first == second


def test_scaling_leaves_out_emulated_links_and_says_where_ranks_share_cores():
    evidence = make_evidence(make_records(), timed=make_timings(["ddp", "fsdp2"]))
    first, *rows = [row[:2] for row in scaling(evidence).tables[0].rows[:5]]
    assert first == [ONE_DEVICE, "2"]
    assert rows == [[run, ranks] for run in ("ddp", "fsdp2") for ranks in "12"]
    (note,) = cores_note(timing_table([make_timed(world_size=4)], BASELINE))
    assert note.startswith("4 ranks of 1 thread shared 2 cores")
    assert cores_note(evidence.timing_rows) == []


@pytest.mark.long
@pytest.mark.parametrize("timing", ["two-ranks", "slow"])
def test_report_accepts_a_single_timing(without_png, tmp_path, timing):
    runs = [make_timed(timing, run) for run in ("ddp", NO_COMMUNICATION)]
    write_report(make_evidence(make_records(["fsdp2", "ddp"]), timed=runs), tmp_path)
    assert "What takes the time?" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "plots/svg/crossover.svg").exists()


@pytest.mark.parametrize(
    ("rates", "ratios", "rate"),
    [
        ([1e8, 1e9], [0.5, 2.0], math.sqrt(1e8 * 1e9)),
        ([1e8, 3e8, 1e9], [0.5, 0.5, 2.0], math.sqrt(3e8 * 1e9)),
        ([1e8], [0.5], math.inf),
        ([1e8, 1e9], [1.1, 2.0], 0.0),
        # noise: what counts is where it stays above
        ([1e8, 3e8, 1e9], [0.9, 1.1, 0.8], math.inf),
    ],
)
def test_crossing_is_interpolated_on_logarithmic_scales(rates, ratios, rate):
    assert crossing(rates, ratios) == pytest.approx(rate)


def test_interval_of_the_break_even_rate_is_that_of_the_ratios():
    slow = timed(1e8, exchange=[100.0, 100.0, 100.0], int8=[40.0, 50.0, 62.5])
    fast = timed(1e9, exchange=[100.0, 100.0, 100.0], int8=[160.0, 200.0, 250.0])
    rate, _, ends = stops_paying(groups_of(slow + fast)[0], "fsdp2-int8").partition(" (")
    assert rate == "316 Mbit/s"
    # not extrapolated
    assert stops_paying(groups_of(slow)[0], "fsdp2-int8") == "above 100 Mbit/s"
    assert stops_paying(groups_of(fast)[0], "fsdp2-int8") == "below 1 Gbit/s"
    low, high = ends.rstrip(")").split(" to ")
    assert float(low.split()[0]) < 316 < float(high.split()[0])


def test_codec_is_compared_with_the_same_strategy_without_codec():
    rows = codec_table(groups_of(make_timings())[0]).rows
    assert {row[0]: row[1] for row in rows} == {
        "ddp-int8": "ddp",
        **{f"fsdp2-{codec}": "fsdp2-exchange" for codec in ("bf16", "int8", "int4", "topk")},
    }
    # not with one of other sharding
    other = parse_strategy({**STRATEGIES["fsdp2-int8"], "reshard_after_forward": False})
    runs = timed(1e8, exchange=[50.0], int8=[25.0])
    runs[1] = runs[1].model_copy(update={"strategy": other.canonical().model_dump(mode="json")})
    assert codec_table(groups_of(runs)[0]).rows == []


def test_links_are_compared_at_equal_ranks_and_delay():
    runs = timed(1e9, fsdp2=[1.0]) + timed(1e8, fsdp2=[2.0]) + timed(1e8, 4, fsdp2=[3.0])
    runs += [*timed(1e8, 2, 5.0, fsdp2=[4.0]), make_timed("two-ranks")]
    groups = groups_of(runs)
    assert [group_title(group) for group in groups] == [
        "2 ranks",
        "2 ranks, 5 ms of delay",
        "4 ranks",
    ]
    # slowest first, without an emulated link last
    assert [*link_headings(groups[0]).values()] == ["100 Mbit/s", "1 Gbit/s", "loopback"]
    assert groups_of([make_timed("two-ranks"), make_timed("one-rank", world_size=1)]) == []


def by_quality(runs, losses, *others):
    facts = {"losses": losses, "timed": runs, "quality": QUALITY, "comparison": runs[0].timing}
    records = [*make_records([BASELINE]), *others]
    return tables_of([time_to_quality(make_evidence(records, **facts))])


def test_time_to_a_loss_is_interpolated_steps_times_the_step_time_of_the_link():
    reached_late = [8.0, 7.0, 6.5]
    losses = {
        BASELINE: {0: pd.Series([8.0, 7.0, 6.0]), 1: pd.Series(reached_late)},
        "fsdp2-int8": {0: pd.Series(reached_late)},
    }
    # other ranks than those of the training have other losses
    runs = timed(1e8, fsdp2=[400.0, 600.0], int8=[250.0, 250.0]) + timed(1e8, 4, fsdp2=[60.0])
    reached, after = by_quality(runs, losses)
    headings = [column.heading for column in reached.columns]
    assert headings[1:3] == ["loss 7, steps", "loss 7, s, 100 Mbit/s"]
    # absent where a seed does not reach it
    assert reached.rows == [
        [BASELINE, "2.00", "1.00", ABSENT, ABSENT],
        ["fsdp2-int8", "2.00", "0.500", ABSENT, ABSENT],
    ]
    assert after.rows == [[BASELINE, "6.25"], ["fsdp2-int8", "6.50"]]
    # evaluations are interpolated, and the later one counts from its end on
    curves = {run: {0: pd.Series({2: 8.0, 4: 6.0})} for run in losses}
    evidence = make_evidence(
        [*make_records([BASELINE])],
        losses=losses,
        validation=curves,
        timed=runs,
        comparison=runs[0].timing,
        quality=Quality(val_loss=(7.0,), time_s=(1.0, 2.1)),
    )
    _, reached, after = tables_of([time_to_quality(evidence)])
    assert reached.title == "Time to a validation loss"
    assert reached.rows == [[BASELINE, "3.00", "1.50"], ["fsdp2-int8", "3.00", "0.750"]]
    assert after.rows == [[BASELINE, "8.00", "6.00"], ["fsdp2-int8", "6.00", "6.00"]]
    # the first steps of a warm-up were not timed
    for part in ({"sync": {"every": 4, "warmup_steps": 9}}, {"gradients": {"warmup_steps": 9}}):
        warm = {"engine": "ddp", **part}
        warmed = make_record("fsdp2-int8").model_copy(update={"strategy": warm})
        assert [row[0] for row in by_quality(runs, losses, warmed)[0].rows] == [BASELINE]


@pytest.mark.parametrize(("every", "whole"), [(64, True), (65, False)])
def test_traced_steps_that_are_no_whole_round_show_no_communication(every, whole):
    strategy = parse_strategy({"engine": "ddp", "sync": {"every": every}})
    form = strategy.canonical().model_dump(mode="json")
    run = make_timed().model_copy(update={"strategy": form})
    row = row_of([run])
    assert math.isnan(row["exposed_share"]) == math.isnan(row["overlap"]) == (not whole)
    assert row["step_ms"] > 0


def test_a_disturbed_timing_is_marked_in_all_headings():
    busy = {"contention": Contention(**BUSY)}
    steps = {"exchange": [10.0, 10.0], "int8": [5.0, 5.0]}
    runs = timed(1e8, **steps)
    runs += [run.model_copy(update=busy) for run in timed(1e9, **steps)]
    [group] = groups_of(runs)
    table = codec_table(group)
    headings = [column.heading for column in table.columns]
    assert headings[2:4] == ["speed-up, 100 Mbit/s", f"speed-up, 1 Gbit/s {DISTURBED}"]
    assert "others used more than" in table.note
    assert "others used" not in codec_table(groups_of(runs[:2])[0]).note


def test_a_pause_is_left_out_of_all_that_rests_on_times_and_marked():
    """The machine slept for twelve seconds in one step; all figures are those without it."""
    chance = random.Random(0)
    quiet = {
        run: [step * chance.uniform(0.9, 1.3) for _ in range(12)]
        for run, step in (("fsdp2", 400.0), ("int8", 250.0), ("none", 40.0))
    }
    slept = {**quiet, "int8": [*quiet["int8"][:5], 12_250.0, *quiet["int8"][6:]]}
    runs = {name: timed(1e8, **steps) for name, steps in (("quiet", quiet), ("slept", slept))}
    tables = {name: timing_table(each, BASELINE).set_index("run") for name, each in runs.items()}
    without = timing_table(timed(1e8, **{k: [*v[:5], *v[6:]] for k, v in quiet.items()}), BASELINE)
    names = ["step_ms", "step_ms_sd", "tokens_per_s"]
    names += [f"{kind}_ratio{end}" for kind in ("step", "bound") for end in ("", "_low", "_high")]
    got, expected = tables["slept"].loc["fsdp2-int8"], without.set_index("run").loc["fsdp2-int8"]
    assert got[names].tolist() == pytest.approx(expected[names].tolist())
    assert (got["repetitions"], got["paused"]) == (11, 1)
    others = [BASELINE, NO_COMMUNICATION]
    pd.testing.assert_frame_equal(tables["slept"].loc[others], tables["quiet"].loc[others])
    table = make_table("", [RUN, STEP], tables["slept"].reset_index().to_dict("records"))
    assert {row[0]: row[1].endswith(PAUSED) for row in table.rows} == {
        BASELINE: False,
        "fsdp2-int8": True,
        NO_COMMUNICATION: False,
    }
    assert "the machine paused" in table.note
    alone = make_timed("one-rank", "fsdp2-int8", world_size=1, step_ms=[100.0])
    there = runs["slept"][1]
    efficiency = scaling_efficiency([alone, there], make_record("fsdp2-int8", link=there.link))
    assert efficiency == pytest.approx(100 / got["step_ms"])
    ratios = {run.run: ratio for run, ratio in ratio_to(runs["slept"], BASELINE)}
    assert ratios["fsdp2-int8"].repetitions == 11
    assert ratios["fsdp2-int8"].ratio == pytest.approx(got["step_ratio"])
