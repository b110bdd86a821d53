"""Timings that take turns: as if each had run by itself, in one file."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardlab.config.schema import Timing
from shardlab.config.timing_record import NO_COMMUNICATION, read_timing
from shardlab.core.errors import UserError
from shardlab.train.interleaved import Turns, time_strategies
from shardlab.train.launch import launch_together
from tests.train.test_timing import plan

WHOLE = Timing(
    runs=("ddp", "fsdp2"),
    repetitions=6,
    interleaved={
        "slow": {"runs": ("ddp",), "link": {"rate": "200mbit"}, "repetitions": 2},
        "one": {"runs": ("fsdp2",), "world_size": 1, "repetitions": 3},
    },
)


def plans_of(data, whole=WHOLE):
    parts = whole.parts("two").items()
    return [replace(plan(data), name=name, timing=timing) for name, timing in parts]


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


def test_an_error_in_one_is_that_of_all(data, tmp_path):
    output = tmp_path / "two.jsonl"
    output.write_text("before\n")
    first, *others = plans_of(data)
    broken = replace(others[-1], data=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere.*missing|nowhere.*stages\.tokenize"):
        time_strategies([first, broken], output)
    assert output.read_text() == "before\n"
    assert [path.name for path in tmp_path.iterdir()] == ["two.jsonl"]


def test_ranks_of_torchrun_take_no_turns(data, tmp_path, monkeypatch):
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
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
