"""Interleaved strategies on the same ranks: each is charged with its own steps only."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from shardlab.config.machine import FRAME_HEADERS, Link
from shardlab.config.model_and_data import Model
from shardlab.config.schema import Timing, Train
from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun, read_timings
from shardlab.core.errors import UserError
from shardlab.train.interleaved import order, time_strategies
from shardlab.train.plans import TimingPlan

STRATEGIES = {
    "ddp": parse_strategy({"engine": "ddp"}),
    "fsdp2": parse_strategy({"engine": "fsdp2"}),
    "manual-int8": parse_strategy(
        {
            "engine": "manual",
            "gradients": {"codec": "int8", "error_feedback": True},
            "weights": {"codec": "int8"},
        }
    ),
}
REPETITIONS = 4


def plan(data: Path, **timing: object) -> TimingPlan:
    values = Timing(**{"runs": tuple(STRATEGIES), "repetitions": REPETITIONS, **timing})
    train = Train(steps=6, batch_size=2, sequence_length=16, untimed_steps=2, profiled_steps=1)
    return TimingPlan("a-timing", values, STRATEGIES, train, Model(preset="tiny"), data)


def timed(data: Path, folder: Path, **timing: object) -> dict[str, TimedRun]:
    output = folder / "timings" / "a-timing.jsonl"
    time_strategies([plan(data, **timing)], output)
    return {run.run: run for run in read_timings(output, "time it again")}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TimedRun]:
    return timed(data, tmp_path_factory.mktemp("timed"))


def test_every_run_has_a_step_of_every_repetition(runs):
    assert list(runs) == [*STRATEGIES, NO_COMMUNICATION]
    assert all(len(run.step_ms) == REPETITIONS and min(run.step_ms) > 0 for run in runs.values())
    assert all(run.contention is not None for run in runs.values())


def test_ledger_of_a_run_holds_the_steps_of_its_repetitions(runs):
    """It has neither the traffic of untimed and traced steps nor that of other runs."""
    gradients = runs["ddp"].ledger["gradients"]
    assert gradients["collectives"] == 1
    # at two ranks an all-reduce sends each element once
    assert gradients["bytes_raw"] == runs["ddp"].bytes_wire == 4 * runs["ddp"].parameters
    assert runs[NO_COMMUNICATION].bytes_raw == runs[NO_COMMUNICATION].bytes_wire == 0
    coded = runs["manual-int8"]
    assert coded.bytes_raw / coded.bytes_wire > 3.5
    for run in runs.values():
        assert run.bytes_wire == sum(kind["bytes_wire"] for kind in run.ledger.values())
        assert run.interface_bytes is None


def test_units_sum_to_the_model(runs):
    for run in runs.values():
        assert sum(unit.elements for unit in run.units) == run.parameters
    names = [unit.name for unit in runs["fsdp2"].units]
    assert names == ["root", "transformer.h.0", "transformer.h.1"]
    assert [unit.name for unit in runs["ddp"].units] == ["bucket0"]


@pytest.mark.long
def test_interface_counters_match_the_ledger_on_a_link(permitted, data, tmp_path):
    runs = timed(data, tmp_path, link=Link(rate="1gbit"), repetitions=2)
    assert {run.link for run in runs.values()} == {"1gbit"}
    assert {run.bits_per_second for run in runs.values()} == {10**9}
    for name in STRATEGIES:
        payload = runs[name].interface_bytes - FRAME_HEADERS * runs[name].interface_frames
        # the rest weighs more the less is sent
        assert runs[name].bytes_wire < payload < 1.03 * runs[name].bytes_wire
    assert runs[NO_COMMUNICATION].interface_bytes < 5000


def test_order_of_runs_is_shuffled_reproducibly():
    turns = [order(number, 5) for number in range(40)]
    assert all(sorted(each) == list(range(5)) for each in turns)
    followed = {(a, b) for each in turns for a, b in pairwise(each)}
    assert len(followed) == 5 * 4
    assert turns == [order(number, 5) for number in range(40)]


def test_failed_rank_keeps_the_output_unchanged(data, tmp_path):
    output = tmp_path / "a-timing.jsonl"
    output.write_text("before\n")
    odd = parse_strategy({"overrides": [{"layers": [7], "param_dtype": "bf16"}]})
    broken = replace(plan(data), strategies={**STRATEGIES, "ddp": odd})
    with pytest.raises(UserError, match="layer 7"):
        time_strategies([broken], output)
    assert output.read_text() == "before\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a-timing.jsonl"]
