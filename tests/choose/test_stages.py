"""The stages of a round: with races of a made machine, and one on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.choose.decision import conclude
from shardlab.choose.history import History
from shardlab.choose.records import Proposal, Trial, TrialSettings
from shardlab.choose.settings import Agent
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import write_json
from shardlab.models.settings import Model
from shardlab.profiling.job import break_down
from shardlab.results.collect import read_losses
from shardlab.results.files import write_results
from shardlab.results.hardware import Hardware
from shardlab.results.table import results_by_strategy
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.results.train_result import TrainResult
from shardlab.train.chat import Conversation, Sampling
from shardlab.train.launch import RunFailed
from shardlab.train.plans import RunPlan, TimingPlan
from shardlab.train.settings import Train
from stages import decide, propose, trial
from stages.sections import Sections
from tests.choose.chat_server import listed, says, serving
from tests.choose.machine import Machine
from tests.choose.searches import AGENT, DDP, FSDP2, INT4_KEPT, KEPT, begin, proposal_of, trial_of
from tests.predict.timing_factory import INT8, made_calibration, made_run
from tests.record_factory import STRATEGIES, make_records, trial_run

FITTED = ("ddp", "fsdp2", "manual")
TIMINGS = {"one-rank": (1, None), "two-ranks": (2, None), "fast": (2, "1gbit")}
STATISTICS = {
    "vocabulary": 300,
    "train": {"documents": 90, "tokens": 9000, "bytes": 30000, "bytes_per_token": 3.3},
    "length": {"p50": 80.0, "p90": 150.5, "p99": 400.0},
    "pad_ratio": 0.0,
    "entropy_bits": 6.789,
}
TREE: dict[str, Any] = {
    "agent": {"start": "fsdp2", "link": {"rate": "100mbit"}, "memory_limit_gb": 4.0},
    "rounds": {
        "1": {"after": "results/results.jsonl"},
        "2": {"after": "results/rounds/1/history.json"},
    },
    "strategies": STRATEGIES,
    "timed_strategies": {"manual": {"engine": "manual"}},
    "train": {"batch_size": 2, "sequence_length": 16, "profiled_steps": 1, "timeout_s": 30},
    "timings": {name: {"runs": [*FITTED]} for name in TIMINGS},
    "forecast": {
        "timings": [*TIMINGS],
        "runs": [*FITTED],
        "ranks": [8],
        "links": ["ethernet-10g"],
        "space": {"gradients": [{"codec": INT8}], "weights": []},
    },
    "model": {"preset": "tiny"},
    "seeds": [0, 1],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> Path:
    """A folder with the matrix trained, everything timed and calibrated, and two rounds to go."""
    monkeypatch.chdir(tmp_path)
    write_results("results/results.jsonl", make_records(seeds=2))
    made_calibration().to_file("results/calibration.json")
    Hardware(cpu="A processor", cores=2, memory_gb=3.0, gpus=[]).to_file("results/hardware.json")
    for name, setting in TIMINGS.items():
        runs = [made_run(name, run, *setting) for run in (*FITTED, NO_COMMUNICATION)]
        write_results(f"results/timings/{name}.jsonl", runs)
    (tmp_path / "data").mkdir()
    for path in data.iterdir():
        (tmp_path / "data" / path.name).symlink_to(path)
    write_json("data/statistics.json", STATISTICS)
    Path("params.yaml").write_text(yaml.safe_dump(TREE))
    return tmp_path


@pytest.fixture
def params(project: Path, monkeypatch: pytest.MonkeyPatch) -> Sections:
    """Sections of the project, whose races and training runs a made machine does."""
    machine = Machine(rate="100mbit", noise=0.02)

    def race(plan: TimingPlan, output: Path, look: object, limit_s: float) -> None:
        proposal = read(Proposal, plan.name.removeprefix("round-"), "proposal")
        assert list(plan.timing.runs) == [arm.hash for arm in proposal.arms]
        assert plan.timing.link is not None and limit_s == proposal.race_limit_s >= 300
        machine.race(proposal, machine.agent()).to_file(output)

    monkeypatch.setattr(trial, "race", race)
    monkeypatch.setattr(trial, "train_run", lambda *_, **__: None)
    monkeypatch.setattr(trial, "evaluated", lambda plan, _: trial_run(plan.strategy, plan.seed))
    return Sections()


def read(kind: Any, number: str, name: str) -> Any:
    return kind.from_file(f"results/rounds/{number}/{name}.json", "make it again")


def settings_of(params: Sections) -> tuple[Train, Model, list[int]]:
    return params("train", Train), params("model", Model), params("seeds", list[int])


def write_proposal(params: Sections, proposal: Proposal) -> None:
    """Write the proposal of a round as the stage does, with the parameters of its training runs."""
    settings = TrialSettings.of(*settings_of(params))
    path = f"results/rounds/{proposal.round}/proposal.json"
    proposal.model_copy(update={"settings": settings}).to_file(path)


def run_round(params: Sections, number: str) -> tuple[Proposal, History]:
    for stage in (propose, trial, decide):
        stage.main(params, number)
    return read(Proposal, number, "proposal"), read(History, number, "history")


def test_two_rounds_build_on_each_other_and_repeat_to_the_byte(params, capsys):
    first, after = run_round(params, "1")
    said = capsys.readouterr().err
    assert "decide 1: accept: " in said and "propose 1: not proposed: sync every=8 (" in said
    assert first.incumbent != after.incumbent
    second, last = run_round(params, "2")
    assert second.incumbent == after.incumbent
    # what was accepted has records, and nothing that has any is trained again
    assert {arm.hash for arm in second.arms if arm.trained} >= {first.incumbent, after.incumbent}
    trained = [
        (run.run, run.seed) for number in "12" for run in read(Trial, number, "trial").results
    ]
    assert (
        len(trained) == len({*trained})
        and after.incumbent_results.trained
        and last.incumbent_results.trained
    )
    assert second.settings == TrialSettings.of(*settings_of(params))
    assert [decision.round for decision in last.rounds] == [1, 2]
    assert [*last.races] == ["round-1", "round-2"]
    path = Path("results/rounds/2/proposal.json")
    before = path.read_bytes()
    propose.main(params, "2")
    assert path.read_bytes() == before


def test_a_language_models_answers_are_stored_and_a_dead_one_leaves_the_choice_to_rules(params):
    with serving(lambda request, n: (200, says(min(listed(request))))) as server:
        asked = ["agent.judge=http", f"agent.endpoint={server.url}", "agent.model=a-model"]
        propose.main(Sections(overrides=asked), "1")
        first = read(Proposal, "1", "proposal")
    assert (first.verdict.judge, len(first.verdict.prompts)) == ("http: a-model", 2)
    propose.main(Sections(overrides=asked), "1")  # without the server
    assert read(Proposal, "1", "proposal") == first
    dead = ["agent.judge=http", "agent.endpoint=http://api..example/v1", "agent.model=another"]
    propose.main(Sections(overrides=dead), "1")
    verdict = read(Proposal, "1", "proposal").verdict
    assert verdict.judge == "rules"
    assert verdict.reason.startswith("http: another gave no usable answer (agent.endpoint: ")


@pytest.mark.long
def test_memory_is_that_of_the_hardware_detected_or_given(params):
    def limit_of(*overrides: str) -> int:
        propose.main(Sections(overrides=["agent.memory_limit_gb=null", *overrides]), "1")
        return read(Proposal, "1", "proposal").memory_limit_bytes

    gpus = (
        'agent.hardware={"gpus": [{"name": "a", "memory_gb": 0.8}, {"name": "b", "memory_gb": 2}]}'
    )
    assert limit_of() == 1_500_000_000  # of each of 2 ranks
    assert limit_of("agent.hardware.memory_gb=2.0") == 1_000_000_000
    assert limit_of(gpus) == 800_000_000
    assert limit_of(gpus, "agent.memory_limit_gb=0.9") == 900_000_000
    Path("results/hardware.json").unlink()
    with pytest.raises(UserError, match=r"hardware\.json: no such file: run shardlab calibrate"):
        limit_of()


@pytest.mark.parametrize("number", ["3", "../1", "x"])
def test_a_round_that_is_not_in_the_parameters_is_refused(params, number):
    with pytest.raises(UserError):
        propose.main(params, number)
    assert not Path("results/rounds").exists()


@pytest.mark.parametrize(
    ("kept_ratio", "quality", "trained"),
    [(0.8, 1.05, [INT4_KEPT, KEPT]), (0.4, 1.0, [KEPT]), (1.2, 1.0, [INT4_KEPT])],
)
def test_what_may_be_held_is_trained_the_fastest_first_until_one_is_tolerated(
    params, monkeypatch, kept_ratio, quality, trained
):
    history = begin(["fsdp2"])
    proposal = proposal_of(history, KEPT, INT4_KEPT)
    race = trial_of(proposal, **{f"_{INT4_KEPT.hash()}": 0.5, f"_{KEPT.hash()}": kept_ratio}).race
    write_proposal(params, proposal)
    ran: list[RunPlan] = []

    def evaluated(plan: RunPlan, runs: Path) -> TrainResult:
        ran.append(plan)
        run = trial_run(plan.strategy, plan.seed)
        factor = quality if plan.strategy.hash() == INT4_KEPT.hash() else 1.0
        return run.model_copy(update={"val_ppl": factor * (run.val_ppl or 0.0)})

    monkeypatch.setattr(trial, "race", lambda plan, output, *_: race.to_file(output))
    monkeypatch.setattr(trial, "evaluated", evaluated)
    trial.main(params, "1")
    record = read(Trial, "1", "trial")
    expected = [(strategy.hash(), seed) for strategy in trained for seed in (0, 1)]
    assert [(plan.run, plan.seed) for plan in ran] == expected
    decided = conclude(history, proposal, record, AGENT)
    assert decided.incumbent == trained[-1].hash()
    assert decided.incumbent_results.files == "results/rounds/1/runs"
    # the records of this round are those of the next one
    again = proposal_of(decided, *trained).model_copy(update={"round": 2})
    write_proposal(params, again)
    ran.clear()
    trial.main(params, "2")
    assert ran == []


def test_a_trial_of_other_parameters_than_its_proposals_is_refused(params):
    propose.main(params, "1")
    with pytest.raises(UserError, match=r"proposal\.json: of other parameters, as with --set: run"):
        trial.main(Sections(overrides=["train.steps=20"]), "1")
    trial.main(Sections(overrides=["train.timeout_s=20"]), "1")  # which changes no result


def test_training_that_fails_is_data_but_a_full_disk_is_not(params):
    proposal = proposal_of(begin(["fsdp2"]), INT4_KEPT)
    train, model, _ = settings_of(params)
    work, runs = trial.Work(proposal, params("rounds.1.agent", Agent), train, model), Path("runs")

    def failing(error: Exception) -> Any:
        def do(step: trial.Step) -> None:
            Path(step.folder, "events.jsonl").touch()
            raise error

        return do

    for error, kind in (RunFailed("memory", "no memory", ""), "memory"), (UserError("no"), "crash"):
        failure = trial.measure(work, failing(error), runs, proposal.arms[-1], 0, 1.0)
        assert (failure.outcome, failure.source) == (kind, "round 1")
        assert not [path for path in runs.rglob("*") if path.is_file()]
    with pytest.raises(StorageError):
        full = failing(StorageError("no space left"))
        trial.measure(work, full, runs, proposal.arms[-1], 0, 1.0)


def test_ranks_that_fail_in_a_race_leave_a_round_without_one(params, monkeypatch):
    propose.main(params, "1")

    def fails(*_: object) -> None:
        raise RunFailed("crash", "a traceback", "rank 1: ArithmeticError: wrong")

    monkeypatch.setattr(trial, "race", fails)
    trial.main(params, "1")
    decide.main(params, "1")
    (done,) = read(History, "1", "history").rounds
    reason = "nothing was raced: the race failed: rank 1: ArithmeticError: wrong"
    assert (done.decision, done.reason) == ("reject", reason)


@pytest.mark.long
@pytest.mark.parametrize("start", ["", "env"])
def test_a_round_on_real_ranks_races_and_decides(project, monkeypatch, start):
    # a job step runs the code that this process runs
    monkeypatch.setenv("PYTHONPATH", str(Path(trial.__file__).parents[1]))
    history = begin(["fsdp2", "ddp"], agent=AGENT)
    write_results("results/results.jsonl", make_records(["fsdp2", "ddp"], seeds=2))
    overrides = ["agent.searches.three={world_size: 3}", "rounds.1.search=three"]
    real = Sections(overrides=["agent.link=null", "agent.repetitions=10", *overrides])
    write_proposal(real, proposal_of(history, DDP))
    trial.main(real, "1", start=start)
    decide.main(real, "1")
    after = read(History, "1", "history")
    ((name, race),) = after.races.items()
    assert name == "round-1" and not after.incumbent_results.failures
    assert {run.run for run in race} == {history.start, DDP.hash(), NO_COMMUNICATION}
    assert {run.world_size for run in race} == {3}
    assert (after.search, after.workload.world_size) == ("three", 3)


@pytest.mark.long
def test_what_a_round_trained_on_real_ranks_is_kept_and_can_be_opened(project, monkeypatch):
    proposal = proposal_of(begin(["fsdp2"]), KEPT)
    race = trial_of(proposal, **{f"_{KEPT.hash()}": 0.5}).race
    monkeypatch.setattr(trial, "race", lambda plan, output, *_: race.to_file(output))
    short = Sections(overrides=["train.steps=6", "seeds=[1]", "train.link=null"])
    write_proposal(short, proposal)
    trial.main(short, "1")
    (record,) = results = read(Trial, "1", "trial").results
    row = results_by_strategy(results, FSDP2.hash())[record.run]
    folder = Path(row.folder, f"seed{record.seed}")
    assert (record.run, record.seed, record.steps) == (KEPT.hash(), 1, 6)
    run = ["events.jsonl", "final_model", "metrics.json", "trace.json.gz"]
    assert sorted(path.name for path in folder.iterdir()) == run
    # in the layout of results/, so that whatever reads a run reads these, too
    assert read_losses(Path(row.files), record.run, record.seed)["loss"].size == 6
    assert break_down([folder / "trace.json.gz"]).steps
    conversation = Conversation(folder / "final_model", Sampling(tokens=2))
    ppl = f"validation perplexity {record.val_ppl:.1f}"
    assert ppl in conversation.banner()
    conversation.answer("One", lambda piece: None)


def test_a_trial_that_ends_early_leaves_what_was_there_before(params, monkeypatch):
    proposal = proposal_of(begin(["fsdp2"]), KEPT)
    race = trial_of(proposal, **{f"_{KEPT.hash()}": 0.5}).race
    monkeypatch.setattr(trial, "race", lambda plan, output, *_: race.to_file(output))
    write_proposal(params, proposal)
    trial.main(params, "1")
    before = {path: path.read_bytes() for path in Path("results/rounds").rglob("*.json")}

    def ends(plan: RunPlan, folder: Path, **_: object) -> None:
        (folder / "metrics.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "train_run", ends)
    with pytest.raises(KeyboardInterrupt):
        trial.main(params, "1")
    assert {path: path.read_bytes() for path in Path("results/rounds").rglob("*.json")} == before
