import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.islands.curves import Curve, LinkTimes, length_at
from benchmarks.islands.families import FAMILIES, ONE_DEVICE, rows_of
from benchmarks.islands.methods import (
    FOLDER,
    METHODS,
    parameters,
    steps_of_equal_tokens,
    strategies,
)
from benchmarks.islands.plots import gains_over_one_device
from benchmarks.islands.report import codecs_table, larger_table, pays_table, tuning_table
from benchmarks.islands.timing import LINKS, Steps, timings, valid_timings
from benchmarks.islands.training import Run, key_of, lengths_around, plan_of, tuned_rate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.results.timing_result import NO_COMMUNICATION
from tests.benchmarks.island_records import STEPS, TWO_RANKS, timed, trained
from tests.token_data import write_tokens


def test_lengths_are_interpolated_in_log_steps() -> None:
    losses = {4000: 2.0, 1000: 4.0, 2000: 3.0}
    half = length_at(3.5, losses)
    assert half is not None
    assert half.steps == pytest.approx(1000 * math.sqrt(2))
    # a nat doubles the steps here
    assert half.per_nat == pytest.approx(math.log(2))
    assert length_at(1.9, losses) is None
    assert length_at(4.1, losses) is None


@pytest.mark.parametrize(
    ("loss", "trained"), [(2.5, [1000, 1400, 2000]), (4.5, [1000, 700]), (0.1, [1000, 1400, 2000])]
)
def test_lengths_are_tried_until_the_loss_is_between_two(loss: float, trained: list[int]) -> None:
    losses = {500: 5.0, 700: 4.6, 1000: 4.0, 1400: 3.0, 2000: 2.0}
    asked = []

    def loss_at(steps: int) -> float:
        asked.append(steps)
        return losses[steps]

    found = lengths_around(1000, loss, loss_at)
    assert asked == trained == [*found]
    assert found == {steps: losses[steps] for steps in trained}


def test_learning_rates_are_tried_until_the_best_is_between_two() -> None:
    assert tuned_rate("a", {0.002: 3.0, 0.003: 2.0, 0.0045: 2.1}.__getitem__) == 0.003
    losses = {0.002: 3.0, 0.003: 2.0, 0.0045: 1.9, 0.0068: 1.95}
    assert tuned_rate("a", losses.__getitem__) == 0.0045
    with pytest.raises(UserError, match="the end of the learning rates"):
        tuned_rate("a", lambda rate: -rate)


def test_every_method_has_a_strategy() -> None:
    assert {method.strategy for method in METHODS.values()} <= set(strategies())


def test_gains_are_of_steps_in_pairs_of_seeds_and_of_times_in_pairs_of_repetitions(
    folder: Path,
) -> None:
    # every second seed is worse by the same for all methods, every second repetition slower
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0, (1, 2000): 3.2})
    trained("one-device", {(0, 4000): 3.0, (0, 5600): 2.0, (1, 4000): 3.2})
    timed("100mbit", STEPS)
    curves = {name: Curve(name) for name in ("stock", "one-device")}
    rows, link = {row.title: row for row in rows_of(curves)}, LinkTimes("100mbit")
    assert link.ratio == pytest.approx(1)
    assert [*rows] == ["ddp", "ddp-bf16", "one-device"]
    assert rows["one-device"].steps == pytest.approx({0: 4000, 1: 4000})
    assert all(link.has(row) for row in rows.values())
    # 4,000 steps of one rank's 80 ms compared with 2,000 of 200
    assert link.gain(rows["ddp"], rows["one-device"]) == pytest.approx([0.8] * 3)
    assert link.over("ddp-bf16", "ddp") == pytest.approx([0.75] * 3)
    assert link.seconds(rows["ddp"]) == pytest.approx(2 * math.sqrt(200 * 220))


def test_one_device_with_two_micro_batches_trains_what_two_ranks_train(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0})
    timed("100mbit", STEPS)
    curves = {name: Curve(name) for name in ("stock", "one-device-acc2")}
    rows, link = {row.title: row for row in rows_of(curves)}, LinkTimes("100mbit")
    alone = rows["one-device-acc2"]
    assert alone.steps == rows["ddp"].steps
    # as many steps, so that the gain is that of a step, and has an interval with one seed, too
    assert link.gain(rows["ddp"], alone) == pytest.approx([0.75] * 3)
    assert curves["one-device-acc2"].mean_bytes() == 0
    assert steps_of_equal_tokens("one-device-acc2", 2000) == 2000


def test_steps_of_a_warm_up_take_their_time(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0})
    trained("diloco32", {(0, 2000): 3.5})
    trained("diloco32-warm", {(0, 1400): 4.0, (0, 2000): 3.0})
    timed("100mbit", {**STEPS, (TWO_RANKS, "diloco32"): [104.0, 104.0]})
    curves = {name: Curve(name) for name in ("stock", "diloco32-warm")}
    warm, link = rows_of(curves)[-1], LinkTimes("100mbit")
    # 200 of the 2,000 steps are those of ddp-int4
    steps_ms = [0.1 * first + 0.9 * 104.0 for first in (120.0, 132.0)]
    assert link.seconds(warm) == pytest.approx(2 * math.sqrt(math.prod(steps_ms)))


def test_bytes_of_a_step_are_those_of_runs_of_as_many_tokens_as_the_target(folder: Path) -> None:
    trained("stock", {(0, 2000): 3.0})
    trained("ddp-int4", {(0, 2000): 3.0, (1, 2000): 3.1, (0, 2800): 2.5})
    path = Run("ddp-int4", 2800, 0, 0.003).path
    write_json(path, {**read_json(path, ""), "bytes_wire": 1000.0})
    assert Curve("ddp-int4").mean_bytes() == 1.0


def test_rates_that_are_not_between_two_others_are_marked(folder: Path) -> None:
    trained("stock", {(0, 2000): 3.0}, rate=0.0045)
    trained("stock", {(0, 2000): 3.1}, rate=0.003)
    trained("ddp-int4", {(0, 2000): 3.0}, rate=0.0045)
    curves = {name: Curve(name) for name in ("stock", "one-device-acc2", "ddp-int4")}
    table = tuning_table(curves)
    alone, stock, int4 = table.rows
    rates = "0.003, 0.0045", "0.0045 (not between two others)"
    assert alone == ["one device", "one-device-acc2", "2", *rates, "stock", "stock"]
    assert stock == ["stock torch", "stock", "1", *rates, "itself", "itself"]
    assert int4 == ["compressed steps", "ddp-int4", "1", *rates, "stock", "itself"]
    assert f"| {' | '.join(int4)} |" in table.markdown()


def test_gains_over_one_device_have_their_intervals(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0})
    timed("100mbit", {**STEPS, (Steps(1, 2), NO_COMMUNICATION): [150.0, 170.0]})
    curves = {name: Curve(name) for name in ("stock", "one-device-acc2")}
    link = LinkTimes("100mbit")
    (stock,) = pays_table(rows_of(curves), [link]).rows
    # as many steps of ddp-bf16, of 150 and 165 ms: 1 and 1.03 times as fast, 12.7 of one degree
    assert stock == ["stock torch", "1.02 (0.84 to 1.23)"]


def test_no_committed_gain_over_one_device_exceeds_the_number_of_devices() -> None:
    curves = {name: Curve(name) for name, method in METHODS.items() if method.world_size <= 2}
    links = [LinkTimes(name) for name in LINKS if (FOLDER / f"timings/{name}.jsonl").is_file()]
    assert links
    rows = [row for row in rows_of(curves) if all(link.has(row) for link in links)]
    assert {row.name for row in rows} >= {*FAMILIES[ONE_DEVICE]}
    for gains in gains_over_one_device(rows, links).values():
        assert all(gain.ratio <= 2 for _, gain in gains)


def test_a_seed_with_a_higher_loss_takes_longer(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0, (1, 2000): 3.0})
    # between 2,000 and 2,800 a nat is a factor of 1.4
    trained("ddp-int4", {(0, 2000): 3.5, (0, 2800): 2.5, (1, 2000): 3.7})
    write_json(Run("stock", 2000, 0, 0.0045).path, {**_record("stock"), "val_loss": 9.0})
    steps = Curve("ddp-int4").steps_to(Curve("stock"))
    assert steps[0] == pytest.approx(2000 * 1.4**0.5)
    assert steps[1] / steps[0] == pytest.approx(1.4**0.2)


def test_quality_is_compared_at_equal_tokens_in_pairs_of_seeds(folder: Path) -> None:
    # a step of one device sees half the tokens; four micro-batches see four times as many
    assert steps_of_equal_tokens("one-device", 2000) == 4000
    assert steps_of_equal_tokens("stock-acc4", 2000) == 500
    trained("stock", {(0, 2000): 3.0, (1, 2000): 3.1, (2, 2000): 9.0, (0, 2800): 2.5})
    trained("one-device", {(0, 4000): 3.1, (1, 4000): 3.2, (0, 5600): 2.7, (1, 5600): 2.0})
    stock, alone = Curve("stock"), Curve("one-device")
    assert alone.perplexity_over(stock) == pytest.approx([math.exp(0.1)] * 3)
    longer = alone.perplexity_over(stock, 2800)
    assert longer is not None and longer.ratio == pytest.approx(math.exp(0.2))
    assert alone.perplexity_over(stock, 4000) is None


def test_the_larger_model_is_compared_with_its_own_baseline(folder: Path) -> None:
    trained("stock", {(0, 2000): 3.0})
    trained("one-device", {(0, 4000): 3.1})
    curves = {name: Curve(name) for name in ("stock", "one-device")}
    assert larger_table(curves) is None
    for name, steps, loss in (("stock", 600, 4.0), ("one-device", 1200, 4.3)):
        trained(name, {(0, steps): loss}, 0.0015, "larger")
        # of another tuning, and of another length
        trained(name, {(0, steps): 9.0}, 0.001, "larger")
        trained(name, {(0, 10 * steps): 1.0}, 0.0015, "larger")
    table = larger_table(curves)
    assert table is not None and [row[2] for row in table.rows] == ["1.000", "1.350"]


def test_synchronisation_with_a_codec_is_compared_with_that_without(folder: Path) -> None:
    trained("diloco32", {(0, 2000): 3.1, (1, 2000): 3.2, (0, 2800): 2.0})
    trained("diloco32-fp32", {(0, 2000): 3.0, (1, 2000): 3.1, (2, 2000): 9.0})
    trained("diloco32-int8", {(0, 2000): 3.0})
    curves = {name: Curve(name) for name in ("diloco32", "diloco32-fp32", "diloco32-int8")}
    rows = codecs_table(curves).rows
    assert [row[0] for row in rows] == ["diloco32", "diloco32-int8"]
    assert [row[-1].split()[0] for row in rows] == ["1.105", "1.000"]


def _record(method: str) -> dict[str, object]:
    """A record of another learning rate."""
    facts = {"strategy_hash": strategies()[METHODS[method].strategy].hash(), "bytes_wire": 1.0}
    return {**Run(method, 2000, 0, 0.0045)._asdict(), **facts}


def test_what_was_not_timed_or_of_other_settings_does_not_count(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0})
    trained("diloco32", {(0, 2000): 3.5})
    trained("diloco32-warm", {(0, 2000): 3.5, (0, 2800): 2.5})
    curves = {name: Curve(name) for name in ("stock", "diloco32-warm")}
    timed("100mbit", STEPS)
    warm = rows_of(curves)[-1]
    assert not LinkTimes("100mbit").has(warm)
    timed("100mbit", {**STEPS, (TWO_RANKS, "diloco32"): [100.0, 110.0]})
    assert LinkTimes("100mbit").has(warm)
    timed("100mbit", {**STEPS, (TWO_RANKS, "diloco32"): [100.0, 110.0]}, batch_size=3)
    assert valid_timings(parameters(), "100mbit") == {}


def test_a_record_is_that_of_what_its_losses_depend_on(folder: Path) -> None:
    """The key of a run with default betas is what it was before they could be chosen."""
    tokens = FOLDER / "data" / "tokens"
    tokens.mkdir(parents=True)
    write_tokens(tokens, [np.arange(10)], 300)
    plan = plan_of(parameters(), Run("stock", 2000, 0, 0.003))
    key = key_of(plan)
    assert key == "d7446cde619d3a60"

    def key_with(**train: object) -> str:
        return key_of(replace(plan, train=plan.train.model_copy(update=train)))

    assert key_with(betas=(0.9, 0.95), timeout_s=1.0, threads=3) == key
    others = [key_with(betas=(0.9, 0.999)), key_with(clip=None), key_with(steps=1000)]
    assert len({key, *others}) == 4


def test_a_link_times_what_its_methods_need() -> None:
    stock = ["ddp", "ddp-bf16"]
    assert timings(["stock"], "100mbit") == {TWO_RANKS: stock}
    assert timings(["one-device", "one-device-acc2"], "100mbit") == {
        TWO_RANKS: ["ddp"],
        Steps(1, 1): ["ddp"],
        Steps(1, 2): ["ddp"],
    }
    assert timings(["diloco32-warm", "stock-acc4", "ddp-int4-acc4"], "100mbit") == {
        TWO_RANKS: ["ddp", "diloco32", "ddp-int4"],
        Steps(2, 4): [*stock, "ddp-int4"],
    }
    nodes = ["hsdp", "hsdp32-warm", "hsdp-int8"]
    assert timings(["hsdp32-warm"], "300mbit-nodes") == {Steps(4, 1): nodes}
    assert timings(["diloco32", "diloco128-warm"], "2300kbit") == {TWO_RANKS: ["diloco128"]}
    assert timings(["stock"], "2300kbit") == {}
    assert timings(["diloco32", "diloco128-warm"], "30mbit-rare") == {TWO_RANKS: ["diloco32"]}
