"""Tables of the island experiment: what is fastest, by how much, and where two machines pay."""

from pathlib import Path

import pytest

from benchmarks.islands.curves import Curve, LinkTimes, records_of
from benchmarks.islands.families import rows_of
from benchmarks.islands.methods import parameters, strategies
from benchmarks.islands.report import pays_table, rare_table, times_table, what_to_use
from benchmarks.islands.timing import Steps, valid_timings
from benchmarks.islands.training import Run
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.results.files import read_results, write_results
from shardlab.results.interval import paired_ratio
from shardlab.results.timing_result import NO_COMMUNICATION
from tests.benchmarks.island_records import STEPS, TWO_RANKS, timed, trained


def test_a_gain_is_as_uncertain_as_seeds_and_repetitions_together(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0, (1, 2000): 3.0, (2, 2000): 3.0})
    losses = {(0, 2000): 3.5, (0, 2800): 2.5, (1, 2000): 3.7, (2, 2000): 3.4}
    trained("ddp-int4", losses)
    stock, int4 = [200.0, 210.0, 220.0], [100.0, 120.0, 100.0]
    timed("100mbit", {**STEPS, (TWO_RANKS, "ddp"): stock, (TWO_RANKS, "ddp-int4"): int4})
    rows = {row.title: row for row in rows_of({n: Curve(n) for n in ("stock", "ddp-int4")})}
    gain = LinkTimes("100mbit").gain(rows["ddp-int4"], rows["ddp"])
    nats = [0.5, 0.7, 0.4]
    steps = paired_ratio([1.4**-nat for nat in nats], [1.0] * 3)
    assert gain == pytest.approx(steps.times(paired_ratio(stock, int4)))


def test_times_leave_out_repetitions_in_which_the_machine_paused(
    folder: Path,
) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0})
    steady = {key: [times[0]] * 4 for key, times in STEPS.items()}
    timed("100mbit", {**steady, (TWO_RANKS, "ddp"): [200.0, 200.0, 90_000.0, 200.0]})
    link, rows = LinkTimes("100mbit"), rows_of({"stock": Curve("stock")})
    # 2,000 steps of 200 ms
    assert times_table(rows[:1], [link]).rows == [["ddp", "6.67"]]


def test_a_learning_rate_is_tuned_by_the_first_seed_at_one_length(folder: Path) -> None:
    trained("stock", {(0, 2000): 3.0}, rate=0.003)
    trained("stock", {(0, 2000): 3.1, (1, 2000): 1.0, (0, 2800): 1.0}, rate=0.0045)
    curve = Curve("stock")
    assert (curve.rate, curve.tuning) == (0.003, {0.003: 3.0, 0.0045: 3.1})


def two_seeds(link: str, int4: list[float], alone: list[float], stock: list[float]) -> None:
    """Write losses of methods that reach the loss after equal tokens, and their steps."""
    methods = {"stock": 2000, "ddp-int4": 2000, "diloco32": 2000, "one-device": 4000}
    for name, steps in methods.items():
        losses = {steps * 7 // 10: 4.0, steps: 3.0}
        trained(name, {(seed, n): loss for seed in range(2) for n, loss in losses.items()})
    timed(
        link,
        {
            (TWO_RANKS, "ddp"): stock,
            (TWO_RANKS, "ddp-bf16"): [2 * step for step in stock],
            (TWO_RANKS, "ddp-int4"): int4,
            (TWO_RANKS, "diloco32"): [130.0, 130.0],
            (TWO_RANKS, NO_COMMUNICATION): [100.0, 100.0],
            (Steps(1, 1), NO_COMMUNICATION): alone,
            (Steps(1, 2), NO_COMMUNICATION): [2 * step for step in alone],
        },
    )


KINDS = "stock", "one-device", "one-device-acc2", "ddp-int4", "diloco32"


def test_the_fastest_is_compared_with_one_device_and_the_kind_that_is_told_apart_least(
    folder: Path,
) -> None:
    two_seeds("100mbit", int4=[120.0, 120.0], alone=[110.0, 110.0], stock=[200.0, 200.0])
    curves = {name: Curve(name) for name in KINDS}
    [short], [full] = (
        table.rows for table in what_to_use(rows_of(curves), [LinkTimes("100mbit")], curves)
    )
    # one device takes 4,000 steps of 110 ms for 2,000 of 120
    assert short == ["1.0 (1.0 to 1.0)", "100mbit", "ddp-int4", "1.83", "1.08 diloco32", "1.000"]
    over = {"1.83 one-device", "1.67 ddp", "1.08 diloco32"}
    assert over < {*full}


def test_a_gain_whose_interval_holds_1_is_not_told_apart(folder: Path) -> None:
    two_seeds("100mbit", int4=[120.0, 170.0], alone=[110.0, 110.0], stock=[200.0, 190.0])
    curves = {name: Curve(name) for name in KINDS}
    short, _ = what_to_use(rows_of(curves), [LinkTimes("100mbit")], curves)
    assert short.rows[0][4].endswith(": not told apart")


def test_gains_over_one_device_stand_from_fast_links_to_slow_ones(folder: Path) -> None:
    two_seeds("1gbit", int4=[120.0, 120.0], alone=[110.0, 110.0], stock=[110.0, 110.0])
    two_seeds("100mbit", int4=[150.0, 150.0], alone=[110.0, 110.0], stock=[440.0, 440.0])
    rows = rows_of({name: Curve(name) for name in KINDS})
    links = [LinkTimes(name) for name in ("100mbit", "1gbit")]
    found = pays_table(rows, links)
    assert found.rows == pays_table(rows, links[::-1]).rows
    # at a ratio of 0.1 twice as fast as one device, at 3.4 half as fast
    assert found.rows[0] == ["stock torch", "2.00", "0.50"]
    assert len(found.rows) == 3


def test_an_exchange_takes_what_all_of_its_steps_take_beyond_computation(folder: Path) -> None:
    trained("stock", {(0, 2000): 3.0})
    times = {"diloco128": [125.0, 125.0], NO_COMMUNICATION: [100.0, 100.0]}
    timed("2300kbit", {(TWO_RANKS, run): step_ms for run, step_ms in times.items()})
    [row] = rare_table([LinkTimes("2300kbit")], {"stock": Curve("stock")}).rows
    # a quarter of a step of computation in each of 128
    assert row[:4] == ["2300kbit", "diloco128", "1.250", "32.0"]


def test_records_and_timings_of_another_strategy_do_not_count(folder: Path) -> None:
    trained("ddp-int4", {(0, 2000): 3.0})
    timed("100mbit", STEPS)
    path = folder / "experiments/islands/timings/100mbit.jsonl"
    runs = read_results(path, "")
    other = strategies()["ddp-int8"].hash()
    changes = {"ddp-int4": {"strategy_hash": other}}
    write_results(path, [run.model_copy(update=changes.get(run.run, {})) for run in runs])
    valid = {name for _, name in valid_timings(parameters(), "100mbit")}
    assert valid == {"ddp", "ddp-bf16", NO_COMMUNICATION}
    record = Run("ddp-int4", 2000, 0, 0.003).path
    write_json(record, {**read_json(record, ""), "strategy_hash": other})
    with pytest.raises(UserError, match=r"of another strategy than params/islands\.yaml"):
        records_of("ddp-int4")
