"""Interleaved strategies on the same ranks: each is charged with its own steps only."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.core.link import FRAME_HEADERS, Link
from shardlab.models.settings import Model
from shardlab.predict.model import workload_of
from shardlab.results.files import read_results, read_timing
from shardlab.results.result import Failure, only
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import parts
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import parse_strategy
from shardlab.train import loop
from shardlab.train.interleaved import Turns, order, time_strategies
from shardlab.train.launch import RunFailed, launch_together
from shardlab.train.plans import TimingPlan
from shardlab.train.settings import Train
from shardlab.train.timing import slowest
from tests.train.faulty_arms import on_rank, raises

STRATEGIES = {
    "ddp": parse_strategy({"engine": "ddp"}),
    "fsdp2": parse_strategy({"engine": "fsdp2"}),
    "manual-int8": parse_strategy(
        {
            "engine": "manual",
            "gradients": {"codec": "int8", "error_feedback": True, "warmup_steps": 50},
            "weights": {"codec": "int8"},
        }
    ),
    "ddp-rare": parse_strategy(
        {
            "engine": "ddp",
            "gradients": {"codec": "int8"},
            "sync": {"every": 3, "fragments": 2, "delay": 2, "warmup_steps": 50},
        }
    ),
}
REPETITIONS = 4


def plan(data: Path, **timing: object) -> TimingPlan:
    values = Timing(**{"runs": tuple(STRATEGIES), "repetitions": REPETITIONS, **timing})
    train = Train(steps=6, batch_size=2, sequence_length=16, untimed_steps=2, profiled_steps=1)
    return TimingPlan("a-timing", values, STRATEGIES, train, Model(preset="tiny"), data)


def timed(data: Path, folder: Path, **timing: object) -> dict[str, TimingResult]:
    output = folder / "timings" / "a-timing.jsonl"
    time_strategies([plan(data, **timing)], output)
    return {run.run: run for run in only(read_results(output, "time it again"), TimingResult)}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TimingResult]:
    return timed(data, tmp_path_factory.mktemp("timed"))


def test_every_run_has_a_step_of_every_repetition(runs):
    assert list(runs) == [*STRATEGIES, NO_COMMUNICATION]
    assert all(len(run.step_ms) == REPETITIONS and min(run.step_ms) > 0 for run in runs.values())
    assert all(run.contention is not None for run in runs.values())


def test_a_timing_may_have_micro_batches_and_steps_of_its_own(data, tmp_path):
    """Its repetitions are of so many steps, each with so many micro-batches of one batch."""
    several = plan(data, runs=("ddp", "ddp-rare"), accumulation=3, steps=2)
    assert [several.steps_of(run) for run in several.runs] == [2, 3, 2]
    runs = timed(data, tmp_path, runs=("ddp",), accumulation=3, steps=2, repetitions=1)
    assert {(run.accumulation, run.batch_size) for run in runs.values()} == {(3, 2)}
    assert runs["ddp"].ledger["gradients"]["collectives"] == 1


def test_a_batch_of_all_ranks_is_one_of_every_number_of_ranks(data, tmp_path):
    """So steps of one rank and of two have the same samples."""
    train = Train(steps=6, global_batch_size=4, sequence_length=16, untimed_steps=2)
    for ranks in (1, 2):
        few = plan(data, runs=("ddp",), world_size=ranks, repetitions=2, steps=1)
        output = tmp_path / f"{ranks}.jsonl"
        time_strategies([replace(few, train=train)], output)
        [run, bound] = only(read_results(output, "time it again"), TimingResult)
        assert (run.batch_size, bound.batch_size) == (4 // ranks, 4 // ranks)


def test_ledger_of_a_run_holds_the_steps_of_its_repetitions(runs):
    """It has neither the traffic of untimed and traced steps nor that of other runs."""
    gradients = runs["ddp"].ledger["gradients"]
    assert gradients["collectives"] == 1
    # at two ranks an all-reduce sends each element once
    assert gradients["bytes_raw"] == runs["ddp"].bytes_wire == 4 * runs["ddp"].parameters
    # every repetition has one exchange of each fragment, and none is of the warm-up
    assert runs["ddp-rare"].bytes_raw == pytest.approx(4 * runs["ddp"].parameters / 3)
    assert runs["ddp-rare"].breakdown.comm_ms_per_step > 0, "a whole round is traced"
    assert runs[NO_COMMUNICATION].bytes_raw == runs[NO_COMMUNICATION].bytes_wire == 0
    coded = runs["manual-int8"]  # nor is any of the warm-up of its gradients
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
    link = Link(rate="1gbit")
    runs = timed(data, tmp_path, link=link, repetitions=2)
    assert {run.link for run in runs.values()} == {link.name}
    assert {run.bits_per_second for run in runs.values()} == {10**9}
    for name in STRATEGIES:
        run = runs[name]
        payload = run.interface_bytes - FRAME_HEADERS * run.interface_frames
        # the rest weighs more the less is sent
        assert run.bytes_wire < payload < 1.03 * run.bytes_wire
        assert run.interface_bytes_inside < 5000
        assert workload_of(run).ranks_per_node == 1
    assert runs[NO_COMMUNICATION].interface_bytes < 5000


def test_a_step_takes_as_long_as_on_the_slowest_rank():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]


def test_a_repetition_waits_for_what_is_on_the_way(data, tmp_path, monkeypatch):
    """Steps that send nothing would hide what the last exchange takes: here half a second."""
    build = loop.build_engine

    def built(model, strategy, *options):
        engine = build(model, strategy, *options)
        if strategy.sync is not None:
            monkeypatch.setattr(engine, "wait", partial(time.sleep, 0.5))
        return engine

    monkeypatch.setattr(loop, "build_engine", built)
    runs = timed(data, tmp_path, runs=("ddp", "ddp-rare"), repetitions=1)
    # a repetition has three steps
    assert runs["ddp-rare"].step_ms[0] >= 500 / 3


def test_order_of_runs_is_shuffled_reproducibly():
    turns = [order(number, 5) for number in range(40)]
    assert all(sorted(each) == list(range(5)) for each in turns)
    followed = {(a, b) for each in turns for a, b in pairwise(each)}
    assert len(followed) == 5 * 4
    assert turns == [order(number, 5) for number in range(40)]


WHOLE = Timing(
    runs=("ddp", "fsdp2"),
    repetitions=6,
    interleaved={
        "slow": {"runs": ("ddp",), "link": {"rate": "200mbit"}, "repetitions": 2},
        "one": {"runs": ("fsdp2",), "world_size": 1, "repetitions": 3},
    },
)


def plans_of(data, whole=WHOLE):
    return [
        replace(plan(data), name=name, timing=timing)
        for name, timing in parts(whole, "two").items()
    ]


@pytest.mark.parametrize("together", [False, True])
def test_an_error_is_that_of_all_and_keeps_the_output(data, tmp_path, together):
    output = tmp_path / "a-timing.jsonl"
    output.write_text("before\n")
    odd = parse_strategy({"overrides": [{"layers": [7], "param_dtype": "bf16"}]})
    broken = replace(plan(data), strategies={**STRATEGIES, "ddp": odd})
    with pytest.raises(UserError, match="layer 7"):
        time_strategies([plans_of(data)[0], broken] if together else [broken], output)
    assert output.read_text() == "before\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a-timing.jsonl"]


@pytest.mark.long
def test_each_timing_has_its_records_in_one_file(data, tmp_path):
    time_strategies(plans_of(data), tmp_path / "two.jsonl")
    runs = read_timing(tmp_path, "two", WHOLE)
    assert [(run.timing, run.run) for run in runs] == [
        *(("two", "ddp"), ("two", "fsdp2"), ("two", NO_COMMUNICATION)),
        *(("one", "fsdp2"), ("one", NO_COMMUNICATION)),
        *(("slow", "ddp"), ("slow", NO_COMMUNICATION)),
    ]
    assert {run.timing: len(run.step_ms) for run in runs} == {"two": 6, "one": 3, "slow": 2}
    assert {run.timing: run.world_size for run in runs} == {"two": 2, "one": 1, "slow": 2}
    by_name = {(run.timing, run.run): run for run in runs}
    assert by_name["slow", "ddp"].bits_per_second == 200_000_000
    assert by_name["two", "ddp"].bits_per_second is None
    # those that wait for their turn are no load: only what runs during the tests is
    assert by_name["slow", "ddp"].contention is not None
    # the same messages, on any link
    assert by_name["slow", "ddp"].bytes_wire == by_name["two", "ddp"].bytes_wire


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
def test_a_run_that_fails_may_be_left_out(data, tmp_path, faulty, together):
    faulty(STRATEGIES["fsdp2"], on_rank(1, 3, raises))
    plans = plans_of(data)[:1] if not together else plans_of(data)
    whole = WHOLE if together else WHOLE.model_copy(update={"interleaved": {}})
    output = tmp_path / "two.jsonl"
    with pytest.raises(RunFailed, match="on purpose"):
        time_strategies(plans, output)
    assert not output.exists()
    time_strategies(plans, output, leave_out=True)
    results = read_timing(tmp_path, "two", whole)
    runs = [(run.timing, run.run) for run in only(results, TimingResult)]
    assert ("two", "ddp") in runs and ("two", NO_COMMUNICATION) in runs
    assert ("two", "fsdp2") not in runs
    assert (("one", "fsdp2") in runs) == together  # it has no rank 1
    [crash] = only(results, Failure)
    assert (crash.timing, crash.run) == ("two", "fsdp2")
    assert crash.detail == "rank 1: ArithmeticError: wrong on purpose"


def test_a_killed_rank_is_told_that_all_runs_are_in_memory_together(data, tmp_path, faulty):
    faulty(STRATEGIES["ddp"], on_rank(1, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    first, *_ = plans_of(data)
    with pytest.raises(RunFailed, match=r"SIGKILL, out of memory\?\); .*: name fewer `runs`, or"):
        time_strategies([first], tmp_path / "two.jsonl")


def test_ranks_of_torchrun_take_no_turns(data, tmp_path, monkeypatch):
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"timings.two.interleaved: .* move one, slow to timings"):
        time_strategies(plans_of(data), tmp_path / "two.jsonl")


def take_turns(turns: Turns, path: Path, number: int, repetitions: int) -> None:
    """Write a line at the begin and the end of each turn, as the only rank of a timing."""
    turn = turns.of(number, 0)
    for repetition in range(repetitions + 1):
        next(turn)
        for edge in ("begin", "end"):
            with path.open("a") as file:
                file.write(f"{edge} {number} {repetition}\n")
            time.sleep(0.001)
    assert next(turn, None) is None


def test_one_timing_at_a_time_does_a_repetition(tmp_path):
    path, repetitions = tmp_path / "turns", [3, 12, 5]
    turns = Turns([(count, 1) for count in repetitions])
    launch_together(
        {
            str(number): partial(take_turns, turns, path, number, count)
            for number, count in enumerate(repetitions)
        }
    )
    lines = path.read_text().splitlines()
    assert len(lines) == 2 * sum(count + 1 for count in repetitions)
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.split() == ["begin", *end.split()[1:]]
    # nobody begins another repetition before those that have done a smaller share of theirs
    done = dict.fromkeys(range(3), 0.0)
    for line in lines[::2]:
        _, number, repetition = map(str, line.split())
        assert done[int(number)] == min(done.values())
        done[int(number)] = (int(repetition) + 1) / repetitions[int(number)]
