import csv
import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.core.errors import RunFailed, UserError
from shardlab.core.files import read_json_lines, write_json, write_json_lines
from shardlab.models.settings import Model
from shardlab.report import write
from shardlab.report.quality import steps_to_quality, training_curve
from shardlab.results.files import read_results, write_results
from shardlab.results.result import Breakdown, Failure
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.results.train_result import Joined, TrainResult, Validation
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.crash import write_crash
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from stages import collect, profile, report
from stages.sections import Sections
from tests.evidence_factory import make_forecast
from tests.record_factory import (
    STRATEGIES,
    in_round,
    make_failure,
    make_history,
    make_losses,
    make_record,
    make_records,
)
from tests.timed_run_factory import make_timed

RUNS, SEEDS = ["ddp", "fsdp2"], [0, 3]
PARAMS = {
    "strategies": {run: {"engine": run} for run in RUNS},
    "seeds": SEEDS,
    "baseline": "fsdp2",
    "rounds": {"1": {"after": "results/results.jsonl"}},
    "train": {"link": {"rate": "100mbit"}},
    "comparison": "slow",
    "timings": {"slow": {"runs": RUNS, "link": {"rate": "100mbit"}}},
    "quality": {"train_loss": [6.0, 0.1], "time_s": [1.01]},
}
TIMED = [make_timed("slow", run) for run in [*RUNS, NO_COMMUNICATION]]
FOLDERS = {"profile": Breakdown, "validate": Validation}
ESTIMATE = {"bytes_by_category": {"parameters": 3, "activations": 4}}


def plan_of(run, seed):
    params = Sections()
    strategy = params(f"strategies.{run}", Strategy)
    return RunPlan(run, seed, strategy, params("train", Train), params("model", Model))


def _write_parts(record):
    plan = plan_of(record.run, record.seed)
    record = record.model_copy(update={"params_hash": plan.params_hash()})
    values = record.model_dump(mode="json", exclude={"schema_version", *Joined.model_fields})
    for folder, kind in FOLDERS.items():
        part = {name: values.pop(name) for name in kind.model_fields}
        write_json(f"results/{folder}/{record.run}/seed{record.seed}.json", part)
    folder = f"results/train/{record.run}/seed{record.seed}"
    write_json(f"{folder}/metrics.json", values)
    write_events(folder, record.run, record.seed)


def write_events(folder, run, seed):
    losses = make_losses(run, seed).items()
    events: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in losses]
    for event in events[9::10]:
        event["val_loss"] = event["loss"] + 0.1
    write_json_lines(f"{folder}/events.jsonl", events)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A project whose matrix is trained, profiled and validated."""
    monkeypatch.chdir(tmp_path)
    write_json("params.yaml", PARAMS)
    write_results("results/timings/slow.jsonl", TIMED)
    write_json("results/memory.json", dict.fromkeys(RUNS, ESTIMATE))
    for run in RUNS:
        for seed in SEEDS:
            _write_parts(make_record(run, seed))
    return tmp_path


def test_collect_joins_the_parts_and_what_was_estimated_and_timed(measured):
    collect.main(Sections())
    records = read_results("results/results.jsonl", "collect")
    joined = {*Joined.model_fields, "params_hash"}
    made = [make_record(run, seed).model_dump(exclude=joined) for run in RUNS for seed in SEEDS]
    assert [record.model_dump(exclude=joined) for record in records] == made
    ddp = records[0]
    assert ddp.memory_estimate_bytes == 7
    assert ddp.scaling_efficiency is None  # no timing of one rank
    with (measured / "results/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(TrainResult.model_fields)
    assert [(row["run"], row["seed"]) for row in rows] == [(r.run, str(r.seed)) for r in records]
    assert json.loads(rows[0]["host"]) == make_record().host


@pytest.mark.parametrize(
    ("path", "content", "error"),
    [
        ("profile/ddp/seed3.json", None, "no such file: run shardlab profile ddp"),
        ("validate/ddp/seed0.json", "[1]", "run shardlab validate ddp"),
        ("profile/fsdp2/seed3.json", '{"step": 1}', "run shardlab profile fsdp2"),
        ("train/ddp/seed3/metrics.json", "\x00", "shardlab train --run ddp --seed 3"),
        ("memory.json", None, "no such file: run shardlab estimate"),
        ("memory.json", "{}", "has no run 'ddp': run shardlab estimate"),
        ("timings/slow.jsonl", None, "no such file: run shardlab timing slow"),
    ],
)
def test_collect_refuses_missing_and_invalid_files(measured, path, content, error):
    file = measured / "results" / path
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as caught:
        collect.main(Sections())
    message = str(caught.value)
    assert message.startswith(f"results/{path}")
    assert error in message
    assert "\n" not in message
    assert not (measured / "results/results.jsonl").exists()


@pytest.fixture
def collected(measured):
    """A project that has everything a report needs."""
    collect.main(Sections())
    make_forecast(RUNS).to_file("results/forecast/forecast.json")
    history = make_history(make_records(RUNS))
    history.to_file("results/rounds/1/history.json")
    write_json("data/source.json", {"name": "wikipedia", "licence": "CC BY-SA 4.0"})
    write_json("data/statistics.json", {"vocabulary": 2048})
    return measured


def test_collect_refuses_results_of_other_parameters(measured):
    with pytest.raises(UserError, match=r"ddp/seed0/metrics.json: of other parameters, as with"):
        collect.main(Sections(overrides=["train.steps=20"]))
    collect.main(Sections(overrides=["train.timeout_s=20"]))  # which changes no result


def test_report_is_written_from_files(undrawn, collected):
    report.main(Sections())
    text = (collected / "results/report/report.html").read_text()
    assert "CC BY-SA 4.0" in text
    assert "Fewer than 3 seeds (2)" in text
    assert "with the answers: results/answers/0123456789abcdef.json." in text


def test_each_seed_has_its_own_time_to_a_loss_beside_the_means(undrawn, collected):
    report.main(Sections())
    folder = collected / "results/report"
    rows = read_json_lines(folder / "quality.jsonl")
    assert [(row["run"], row["seed"]) for row in rows] == [(r, s) for r in RUNS for s in SEEDS]
    (record,) = (
        record
        for record in read_results("results/results.jsonl", "collect")
        if (record.run, record.seed) == ("ddp", 3)
    )
    losses = make_losses("ddp", 3)
    (row,) = (row for row in rows if (row["run"], row["seed"]) == ("ddp", 3))
    steps = steps_to_quality(training_curve(losses.values()), 6.0)
    assert row["steps_to_quality"]["train_loss"] == {"6": steps, "0.1": None}
    seconds = row["time_to_quality_s"]["train_loss"]["6"]
    assert seconds == pytest.approx(steps * record.step_ms_mean / 1e3)
    # the model was evaluated after steps 10, 20, ...
    evaluated = losses[(int(1010 / record.step_ms_mean) // 10) * 10 - 1] + 0.1
    assert row["quality_at_time"]["val_loss"] == {"1.01": pytest.approx(evaluated)}
    tables = (folder / "tables.md").read_text()
    assert "Validation loss at equal time" in tables
    assert "](plots/svg/validation.svg)" in tables


def test_without_evaluations_the_report_has_no_validation_curve(undrawn, collected):
    for path in collected.glob("results/train/*/*/events.jsonl"):
        events = read_json_lines(path)
        write_json_lines(path, [{k: e[k] for k in ("step", "loss")} for e in events])
    report.main(Sections())
    tables = (collected / "results/report/tables.md").read_text()
    assert "validation.svg" not in tables and "Training loss at equal time" in tables
    assert "Validation loss at equal time" not in tables


FAILURE = RunFailed("crash", "rank 1: Traceback ...", "rank 1: ArithmeticError: wrong on purpose")


def crash_of(run, seed, failure=FAILURE):
    plan = plan_of(run, seed)
    folder = Path(f"results/train/{run}/seed{seed}")
    return write_crash(plan, folder, failure, f"logs/train/{run}/{seed}.log")


def test_a_run_that_crashed_is_named_on_top_and_the_others_are_reported(undrawn, collected):
    crash = crash_of("ddp", 3)
    assert crash.detail == f"{FAILURE.summary} (log: logs/train/ddp/3.log)"
    assert (collected / "results/train/ddp/seed3/final_model/model.safetensors").stat().st_size == 0
    for seed in SEEDS[:1]:
        crash_of("ddp", seed, RunFailed("memory", "", "rank 0 was killed by signal 9"))
    profile.main(Sections(), "ddp")
    collect.main(Sections())
    lines = read_results("results/results.jsonl", "collect")
    assert [(line.run, line.seed, isinstance(line, Failure)) for line in lines] == [
        *(("ddp", seed, True) for seed in SEEDS),
        *(("fsdp2", seed, False) for seed in SEEDS),
    ]
    assert [line.outcome for line in lines[:2]] == ["memory", "crash"]
    with (collected / "results/results.csv").open(newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {"fsdp2"}
    report.main(Sections())
    folder = collected / "results/report"
    named = "ddp in training, seed 3: rank 1: ArithmeticError: wrong on purpose (log: logs/train/"
    first, table = (folder / "headline.md").read_text().split("\n\n", 1)
    assert first.startswith("Crashed, and left out: ddp in training, seed 0: ") and named in first
    assert "ddp" not in table.replace("fsdp2", "")
    assert named in (folder / "report.html").read_text()
    with pytest.raises(UserError, match=r"baseline: run 'ddp' crashed \(rank 1: .*name another"):
        report.main(Sections(overrides=["baseline=ddp"]))


def test_a_run_that_a_timing_left_out_is_named_and_not_compared(undrawn, collected):
    lost = make_failure(
        parse_strategy(STRATEGIES["ddp"]),
        "crash",
        "rank 1: ArithmeticError: wrong",
        **{"kind": "timing", "timing": "slow", "run": "ddp"},
    )
    write_results("results/timings/slow.jsonl", [*TIMED[1:], lost])
    report.main(Sections())
    headline = (collected / "results/report/headline.md").read_text()
    assert "left out: ddp in timing slow: rank 1: ArithmeticError: wrong." in headline
    lines = (collected / "results/report/comparison.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == ["fsdp2"]
    other = lost.model_copy(update={"run": "manual"})
    write_results("results/timings/slow.jsonl", [*TIMED, other])
    with pytest.raises(UserError, match=r"slow\.jsonl: has other runs than timings\.slow"):
        report.main(Sections())


def test_a_run_that_somebody_ended_has_no_record(collected):
    before = (collected / "results/train/ddp/seed0/metrics.json").read_text()
    ended = RunFailed("crash", "", "rank 1 was killed by signal 15 (SIGTERM)")
    with pytest.raises(RunFailed, match="crash"):
        crash_of("ddp", 0, ended)
    assert (collected / "results/train/ddp/seed0/metrics.json").read_text() == before


def test_report_is_limited_to_the_runs_of_the_parameters(undrawn, collected):
    ddp, fsdp2 = ({run: {"engine": run}} for run in RUNS)
    only = {"strategies": fsdp2, "timed_strategies": ddp, "seeds": [3]}
    write_json("params.yaml", {**PARAMS, **only})
    report.main(Sections())
    lines = (collected / "results/report/comparison.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == ["fsdp2"]


def hold(run):
    """A history whose search holds what its round 1 raced and trained, with the files of that;
    returns their folder."""
    strategy = parse_strategy(STRATEGIES[run])
    key, runs = strategy.hash(), Path("results/rounds/1/runs")
    own = [make_record(run, seed).model_copy(update=in_round(strategy)) for seed in SEEDS]
    for seed in SEEDS:
        write_events(runs / f"train/{key}/seed{seed}", run, seed)
    raced = make_timed("slow", run).model_copy(update=in_round(strategy, 1, "race"))
    history = make_history(make_records(RUNS)).with_results([*own, raced])
    last = history.rounds[-1].model_copy(update={"held": key})
    update = {"rounds": [last], "incumbent": key}
    history.model_copy(update=update).to_file("results/rounds/1/history.json")
    return f"{runs}/train/{key}"


def test_what_a_search_found_is_shown_beside_the_runs(monkeypatch, collected):
    folder, drawn = hold("fsdp2-int8"), {}
    monkeypatch.setattr(
        write, "save", lambda figure, path, kind: drawn.update({path.stem: figure}) or path.touch()
    )
    report.main(Sections())
    with Path("results/report/loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["run"] == "found-by-search"]
    by_seed = [make_losses("fsdp2-int8", seed).values() for seed in SEEDS]
    assert losses == pytest.approx([sum(pair) / 2 for pair in zip(*by_seed, strict=True)])
    labels = [label.get_text() for label in drawn["breakdown"].axes[0].get_yticklabels()]
    assert labels == ["found-by-search", *reversed(RUNS)]
    text = Path("results/report/tables.md").read_text().replace("\\", "")
    for title in "Step breakdown", "Traffic", "Codec statistics", "Memory, compute and link":
        table = text.partition(f"## {title}\n")[2].partition("## ")[0]
        assert table.count("| found-by-search |") == 1, title
    assert f"Its training runs are in {folder}." in text
    compared = Path("results/report/comparison.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in compared] == RUNS
    Path(folder, "seed3/events.jsonl").unlink()
    with pytest.raises(UserError, match=rf"^{folder}/.*: no such file: run shardlab trial 1$"):
        report.main(Sections())


def test_what_a_search_found_has_another_name_than_a_run(undrawn, collected):
    hold("fsdp2-int8")
    named = {"found-by-search": {"engine": "fsdp2", "wrap": "root"}}
    timed = make_timed("other", "fsdp2").model_copy(update={"run": "found-by-search"})
    own = {**PARAMS["timings"], "other": {"runs": ["found-by-search"]}}
    write_json("params.yaml", {**PARAMS, "timed_strategies": named, "timings": own})
    write_results("results/timings/other.jsonl", [timed, make_timed("other", NO_COMMUNICATION)])
    report.main(Sections())
    with Path("results/report/loss.csv").open(newline="") as file:
        runs = {row["run"] for row in csv.DictReader(file)}
    assert runs == {*RUNS, "found-by-search-again"}


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("results/results.jsonl", "collect"),
        ("results/rounds/1/history.json", "decide 1"),
        ("data/source.json", "prepare"),
        ("data/statistics.json", "tokenize"),
        ("results/train/ddp/seed3/events.jsonl", "train --run ddp --seed 3"),
        ("results/timings/slow.jsonl", "timing slow"),
        ("results/forecast/forecast.json", "forecast"),
    ],
)
def test_report_names_the_stage_of_a_missing_or_damaged_file(collected, path, fix):
    (collected / path).write_text("[1")
    with pytest.raises(UserError, match=f"{path}.*: run shardlab {fix}"):
        report.main(Sections())
    (collected / path).unlink()
    with pytest.raises(UserError, match=f"{path}: no such file: run shardlab {fix}"):
        report.main(Sections())
    assert not (collected / "results/report").exists()


def test_report_refuses_the_runs_of_another_timing(collected):
    write_json_lines("results/timings/slow.jsonl", [TIMED[0].model_dump(mode="json")])
    with pytest.raises(UserError, match=r"other runs than timings\.slow: run shardlab timing slow"):
        report.main(Sections())
