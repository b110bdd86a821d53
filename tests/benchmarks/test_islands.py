import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.islands.curves import Curve, LinkTimes, length_at
from benchmarks.islands.methods import (
    FOLDER,
    METHODS,
    parameters,
    steps_of_equal_tokens,
    strategies,
)
from benchmarks.islands.report import crossing, exchanges_table, larger_table, rows_of
from benchmarks.islands.timing import timing_path, timings, valid_timings
from benchmarks.islands.training import Run, key_of, lengths_around, plan_of, tuned_rate
from shardlab.config.timing_record import NO_COMMUNICATION, write_timings
from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from tests.timed_run_factory import make_timed
from tests.token_data import write_tokens


def test_lengths_are_interpolated_in_log_steps() -> None:
    losses = {4000: 2.0, 1000: 4.0, 2000: 3.0}
    half = length_at(3.5, losses)
    assert half is not None
    assert math.exp(half.log) == pytest.approx(1000 * math.sqrt(2))
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


def test_ratio_at_which_a_second_machine_pays_no_more() -> None:
    # a gain of 4 at a ratio of 1, of a quarter at 100: 1 in the middle of their logarithms
    assert crossing([(1.0, 4.0), (100.0, 0.25)]) == "10"
    assert crossing([(1.0, 4.0), (100.0, 2.0)]) == "beyond 100"
    assert crossing([(1.0, 0.9), (100.0, 0.5)]) == "never, in what was timed"


def test_every_method_has_a_strategy() -> None:
    assert {method.strategy for method in METHODS.values()} <= set(strategies())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records."""
    parameters()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(
    method: str,
    losses: Mapping[tuple[int, int], float],
    rate: float = 0.003,
    folder: str = "runs",
) -> None:
    """Write records of runs at one learning rate, by seed and steps."""
    for (seed, steps), loss in losses.items():
        run = Run(method, steps, seed, rate, folder)
        strategy = strategies()[METHODS[method].strategy]
        facts = {"strategy_hash": strategy.hash(), "bytes_wire": 1.0, "parameters": 10}
        write_json(run.path, {**run._asdict(), **facts, "val_loss": loss})


def timed(link: str, steps_ms: Mapping[str, list[float]], **changes: object) -> None:
    """Write the timing of steps of one micro-batch on a link."""
    train, runs = parameters()("train"), []
    for run, step_ms in steps_ms.items():
        strategy = strategies().get(run)
        facts = {
            "strategy": strategy and strategy.canonical().model_dump(mode="json"),
            "strategy_hash": strategy and strategy.hash(),
            "model": parameters()("model").name,
            "batch_size": train.batch_size,
            "sequence_length": train.sequence_length,
        }
        runs.append(make_timed("one", run, step_ms=step_ms, **{**facts, **changes}))
    write_timings(timing_path(link), runs)


STEPS = {
    "fsdp2": [300.0, 330.0],
    "ddp": [200.0, 220.0],
    "ddp-bf16": [150.0, 165.0],
    "ddp-int4": [120.0, 132.0],
    NO_COMMUNICATION: [100.0, 110.0],
}


def test_gains_are_of_steps_in_pairs_of_seeds_and_of_their_times(folder: Path) -> None:
    # every second seed is worse by the same for all methods
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0, (1, 2000): 3.2})
    trained("one-device", {(0, 4000): 3.0, (0, 5600): 2.0, (1, 4000): 3.2})
    timed("100mbit", STEPS)
    curves = {name: Curve(name) for name in ("stock", "one-device")}
    rows, link = {row.title: row for row in rows_of(curves)}, LinkTimes("100mbit")
    assert link.ratio == pytest.approx(2)
    assert [*rows] == ["fsdp2", "ddp", "ddp-bf16", "one-device"]
    assert rows["one-device"].logs == pytest.approx({0: math.log(4000), 1: math.log(4000)})
    assert all(link.has(row) for row in rows.values())
    # 4,000 steps of 100 ms against 2,000 of 200
    gain = link.gain(rows["ddp"], rows["one-device"])
    assert gain.ratio == pytest.approx(1) and math.isfinite(gain.low)
    assert link.over("ddp", "fsdp2") == pytest.approx((2 / 3, 2 / 3, 2 / 3))


def test_a_seed_with_a_higher_loss_takes_longer(folder: Path) -> None:
    trained("stock", {(0, 1400): 4.0, (0, 2000): 3.0, (1, 2000): 3.0})
    # between 2,000 and 2,800 a nat is a factor of 1.4
    trained("ddp-int4", {(0, 2000): 3.5, (0, 2800): 2.5, (1, 2000): 3.7})
    write_json(Run("stock", 2000, 0, 0.0045).path, {**_record("stock"), "val_loss": 9.0})
    logs = Curve("ddp-int4").steps_to(Curve("stock"))
    assert logs[0] == pytest.approx(math.log(2000) + 0.5 * math.log(1.4))
    assert logs[1] - logs[0] == pytest.approx(0.2 * math.log(1.4))


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


def test_compressed_exchanges_are_compared_with_uncompressed_ones(folder: Path) -> None:
    trained("diloco32", {(0, 2000): 3.1, (1, 2000): 3.2, (0, 2800): 2.0})
    trained("diloco32-fp32", {(0, 2000): 3.0, (1, 2000): 3.1, (2, 2000): 9.0})
    trained("diloco32-int8", {(0, 2000): 3.0})
    curves = {name: Curve(name) for name in ("diloco32", "diloco32-fp32", "diloco32-int8")}
    rows = exchanges_table(curves).rows
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
    timed("100mbit", {**STEPS, "diloco32": [100.0, 110.0]})
    assert LinkTimes("100mbit").has(warm)
    timed("100mbit", {**STEPS, "diloco32": [100.0, 110.0]}, batch_size=3)
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
    assert timings(["one-device"], "100mbit") == {}
    stock = ["fsdp2", "ddp", "ddp-bf16"]
    assert timings(["stock"], "100mbit") == {1: stock}
    assert timings(["diloco32-warm", "stock-acc4"], "100mbit") == {
        1: ["fsdp2", "diloco32", "ddp-int4"],
        4: stock,
    }
    assert timings(["hsdp32-warm"], "300mbit-nodes") == {1: ["hsdp", "hsdp32-warm", "hsdp-int8"]}
    assert timings(["diloco32", "diloco128-warm"], "2300kbit") == {1: ["diloco128"]}
    assert timings(["stock"], "2300kbit") == {}
    assert timings(["diloco32", "diloco128-warm"], "30mbit-rare") == {1: ["diloco32"]}
