"""One reader for results of all kinds, which refuses what it cannot take for one."""

from pathlib import Path
from typing import Any

import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import write_json, write_json_lines
from shardlab.results.files import read_failure, read_results, read_timing, write_results
from shardlab.results.result import SCHEMA_VERSION, Failure, only
from shardlab.results.settings import Timing
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES, make_failure, make_record, make_records
from tests.timed_run_factory import make_timed, make_timings
from tests.tuned_factory import make_row

DDP = parse_strategy(STRATEGIES["ddp"])
FAILURE = make_failure(DDP, "memory", "rank 0: no memory")
LOST = make_failure(DDP, "crash", kind="timing", timing="slow", run="ddp")
FIX = "run shardlab collect"


def test_results_of_all_kinds_round_trip_in_their_order(tmp_path: Path) -> None:
    diverged = make_record(diverged_at=7, train_loss=None)
    race = make_timed("slow").model_copy(update={"kind": "race", "losses": [7.6, None]})
    tuned = [make_row(), make_row(val_loss=None)]
    results = [*make_records(), diverged, FAILURE, *tuned, *make_timings(), race, LOST]
    write_results(tmp_path / "all.jsonl", results)
    again = read_results(tmp_path / "all.jsonl", FIX)
    assert again == results
    assert only(again, Failure) == [FAILURE, LOST]
    assert only(again, TuneResult) == tuned
    assert len(only(again, TrainResult)) + len(only(again, TimingResult)) + 4 == len(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": SCHEMA_VERSION - 1}, ": written by another version of shardlab"),
        ({"schema_version": SCHEMA_VERSION + 1}, ": written by another version of shardlab"),
        ({"kind": "guess"}, r"\.kind: a result is one of train, .* \(found 'guess'\)"),
        ({"speed": 1.0}, r"\.speed: unknown key"),
        ({"steps": "many"}, r"\.steps: input should be a valid integer"),
    ],
)
def test_what_is_no_result_is_named_by_file_and_line_with_the_command_that_makes_it(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = make_record().model_dump(mode="json")
    write_json_lines(tmp_path / "results.jsonl", [good, good | change])
    with pytest.raises(UserError, match=rf"results\.jsonl:2{message}.*: {FIX}$"):
        read_results(tmp_path / "results.jsonl", FIX)


def test_results_without_a_version_are_of_an_earlier_one(tmp_path: Path) -> None:
    old = make_timed().model_dump(mode="json", exclude={"schema_version", "kind"})
    write_json_lines(tmp_path / "slow.jsonl", [old])
    with pytest.raises(UserError, match=rf":1: written by another version of shardlab: {FIX}"):
        read_results(tmp_path / "slow.jsonl", FIX)
    write_json_lines(tmp_path / "slow.jsonl", [["no", "object"]])
    with pytest.raises(UserError, match=r":1: not a result"):
        read_results(tmp_path / "slow.jsonl", FIX)


def test_a_file_of_a_run_holds_figures_or_a_failure(tmp_path: Path) -> None:
    FAILURE.to_file(tmp_path / "lost.json")
    write_json(tmp_path / "good.json", {"val_loss": 3.0})
    assert read_failure(tmp_path / "lost.json", FIX) == FAILURE
    assert read_failure(tmp_path / "good.json", FIX) is None


def test_a_timing_has_its_runs_or_how_they_failed_and_no_others(tmp_path: Path) -> None:
    timing = Timing(runs=("ddp", "fsdp2"), world_size=2, repetitions=6)
    ddp, fsdp2, bound = (make_timed("slow", run) for run in ("ddp", "fsdp2", NO_COMMUNICATION))
    for results in [ddp, fsdp2, bound], [fsdp2, bound, LOST]:
        write_results(tmp_path / "slow.jsonl", results)
        assert read_timing(tmp_path, "slow", timing) == results
    elsewhere = LOST.model_copy(update={"timing": "fast"})
    for results in [fsdp2, bound], [ddp, fsdp2, bound, LOST], [fsdp2, bound, elsewhere]:
        write_results(tmp_path / "slow.jsonl", results)
        with pytest.raises(UserError, match=r"slow\.jsonl: has other runs than timings\.slow: run"):
            read_timing(tmp_path, "slow", timing)
