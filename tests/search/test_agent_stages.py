"""The stages of a round: with races of a made machine, and one on real ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.config.hardware import Hardware
from shardlab.config.parameters import Parameters
from shardlab.config.run_record import Record, write_records
from shardlab.config.timing_record import NO_COMMUNICATION, write_timings
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import write_json
from shardlab.search.conversation import Conversation
from shardlab.search.decision import conclude
from shardlab.search.history import History
from shardlab.search.policies.documents import PolicyComparison
from shardlab.search.rounds import Proposal, Trial
from shardlab.train.launch import RunFailed
from shardlab.train.run_plan import RunPlan
from shardlab.train.timing_plan import TimingPlan
from stages import decide, plans, policies, propose, trial
from tests.record_factory import STRATEGIES, make_record, make_records
from tests.search.chat_server import listed, reader, says, serving
from tests.search.machine import SPACE, TIMED
from tests.search.racing import RacingMachine
from tests.search.searches import AGENT, DDP, INT4_KEPT, KEPT, begin, proposal_of, trial_of

TIMINGS = ("one-rank", "two-ranks", "fast")
STATISTICS = {
    "vocabulary": 300,
    "train": {"documents": 90, "tokens": 9000, "bytes": 30000, "bytes_per_token": 3.3},
    "length": {"p50": 80.0, "p90": 150.5, "p99": 400.0},
    "pad_ratio": 0.0,
    "entropy_bits": 6.789,
}
FEW = SPACE.model_copy(update={"gradients": SPACE.gradients[1:2], "weights": ()})
"""whose forecast takes less time"""
HARDWARE = Hardware(cpu="A processor", cores=2, memory_gb=3.0, gpus=[])
TREE: dict[str, Any] = {
    "agent": {"start": "fsdp2", "link": {"rate": "100mbit"}, "memory_limit_gb": 4.0},
    "rounds": {
        "1": {"after": "results/results.jsonl"},
        "2": {"after": "results/rounds/1/history.json"},
    },
    "strategies": STRATEGIES,
    "timed_strategies": {run: {"engine": run} for run in TIMED if run not in STRATEGIES},
    "train": {"batch_size": 2, "sequence_length": 16, "profiled_steps": 1, "timeout_s": 30},
    "timings": {name: {"runs": [*TIMED]} for name in TIMINGS},
    "forecast": {
        "timings": [*TIMINGS],
        "runs": [*TIMED],
        "ranks": [8],
        "links": ["ethernet-10g"],
        "space": FEW.model_dump(mode="json"),
    },
    "model": {"preset": "tiny"},
    "seeds": [0, 1],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> Path:
    """A folder with the matrix trained, everything timed and calibrated, and two rounds to go."""
    monkeypatch.chdir(tmp_path)
    write_records("results/results.jsonl", make_records(seeds=2))
    machine = RacingMachine(rate="100mbit")
    machine.calibration.to_file("results/calibration.json")
    HARDWARE.to_file("results/hardware.json")
    for name in TIMINGS:
        runs = [run for run in machine.timed if run.timing == name]
        write_timings(f"results/timings/{name}.jsonl", runs)
    (tmp_path / "data").mkdir()
    for path in data.iterdir():
        (tmp_path / "data" / path.name).symlink_to(path)
    write_json("data/statistics.json", STATISTICS)
    Path("params.yaml").write_text(yaml.safe_dump(TREE))
    return tmp_path


@pytest.fixture
def params(project: Path, monkeypatch: pytest.MonkeyPatch) -> Parameters:
    """Parameters of the project, whose races and training runs a made machine does."""
    machine = RacingMachine(rate="100mbit")

    def race(plan: TimingPlan, output: Path, look: object, limit_s: float) -> None:
        folder = f"results/rounds/{plan.name.removeprefix('round-')}"
        proposal = Proposal.from_file(f"{folder}/proposal.json", "make it again")
        assert list(plan.timing.runs) == [arm.hash for arm in proposal.arms]
        assert plan.timing.link is not None and limit_s == 300
        machine.race(proposal, machine.agent()).to_file(output)

    monkeypatch.setattr(trial, "race", race)
    monkeypatch.setattr(trial, "train_run", lambda *_, **__: None)
    monkeypatch.setattr(trial, "evaluated", lambda plan, _: make_record("fsdp2", plan.seed))
    return Parameters()


def run_round(params: Parameters, number: str) -> tuple[Proposal, History]:
    for stage in (propose, trial, decide):
        stage.main(params, number)
    folder = Path("results/rounds", number)
    return (
        Proposal.from_file(folder / "proposal.json", "make it again"),
        History.from_file(folder / "history.json", "make it again"),
    )


def test_two_rounds_build_on_each_other_and_repeat_to_the_byte(params, capsys):
    first, after = run_round(params, "1")
    assert after.rounds[0].decision == "accept"
    assert first.incumbent != after.incumbent
    assert "round 1: accept: " in capsys.readouterr().err
    second, last = run_round(params, "2")
    assert second.incumbent == after.incumbent
    assert [each.round for each in last.rounds] == [1, 2]
    assert [race.name for race in last.races] == ["round-1", "round-2"]
    for number in ("1", "2"):
        path = Path("results/rounds", number, "proposal.json")
        before = path.read_bytes()
        path.unlink()
        propose.main(params, number)
        assert path.read_bytes() == before


def test_a_dead_judge_leaves_a_line_and_the_choice_to_rules(params, monkeypatch):
    monkeypatch.setattr("shardlab.search.endpoint.time.sleep", lambda _: None)
    endpoint = ["agent.judge=http", "agent.endpoint=http://127.0.0.1:9/v1", "agent.model=a-model"]
    propose.main(params, "1")
    path = Path("results/rounds/1/proposal.json")
    by_rules = Proposal.from_file(path, "make it again")
    propose.main(Parameters(overrides=endpoint), "1")
    found = Proposal.from_file(path, "make it again")
    assert found.arms == by_rules.arms
    assert found.verdict.reason.startswith("http: a-model gave no answer (")
    assert found.verdict.reason.endswith(by_rules.verdict.reason)
    kept = Conversation.from_file("results/rounds/1/conversation.json", "make it again")
    assert (kept.judge, kept.exchanges) == ("http: a-model", [])


def test_a_conversation_is_kept_and_replayed_without_a_server(params):
    folder = Path("results/rounds/1")
    with serving(reader) as server:
        asked = ["agent.judge=http", f"agent.endpoint={server.url}", "agent.model=a-model"]
        propose.main(Parameters(overrides=asked), "1")
    first = Proposal.from_file(folder / "proposal.json", "make it again")
    assert (first.verdict.judge, first.verdict.prompts) == ("http: a-model", 12)
    before = keep(folder / "conversation.json")
    propose.main(Parameters(overrides=REPLAYED), "1")
    again = Proposal.from_file(folder / "proposal.json", "make it again")
    assert again.verdict == first.verdict.model_copy(update={"judge": "replay"})
    assert again.arms == first.arms
    kept = Conversation.from_file(folder / "conversation.json", "make it again")
    assert kept.exchanges == before.exchanges


REPLAYED = ["agent.judge=replay", "agent.model=kept.json"]


def keep(path: Path) -> Conversation:
    """Copy a conversation to where `replay` answers from."""
    shutil.copy(path, "kept.json")
    return Conversation.from_file(path, "make it again")


def limit_of(*overrides: str) -> int:
    """Return the memory of a rank that a proposal is limited to."""
    propose.main(Parameters(overrides=["agent.memory_limit_gb=null", *overrides]), "1")
    found = Proposal.from_file("results/rounds/1/proposal.json", "make it again")
    return found.memory_limit_bytes


@pytest.mark.long
def test_memory_is_that_of_the_hardware_detected_or_given(params):
    gpus = (
        'agent.hardware={"gpus": [{"name": "a", "memory_gb": 0.8}, {"name": "b", "memory_gb": 2}]}'
    )
    assert limit_of() == 1_500_000_000  # of each of 2 ranks
    assert limit_of("agent.hardware.memory_gb=2.0") == 1_000_000_000
    assert limit_of(gpus) == 800_000_000
    assert limit_of(gpus, "agent.memory_limit_gb=0.9") == 900_000_000
    Path("results/hardware.json").unlink()
    with pytest.raises(UserError, match=r"hardware\.json: no such file: run .*stages\.calibrate"):
        limit_of()


ONE = (
    'comparison="two-ranks"',
    'strategies={"fsdp2": {"engine": "fsdp2"}}',
    f"timed_strategies={json.dumps({run: {'engine': run} for run in TIMED if run != 'fsdp2'})}",
    'policies={"timings": ["two-ranks"], "seeds": 1, "budget": 1}',
)
"""one replay of each policy, on the timing of the matrix"""


def compared(*overrides: str) -> PolicyComparison:
    policies.main(Parameters(overrides=[*ONE, *overrides]))
    return PolicyComparison.from_file("results/policies/policies.json", "make it again")


def test_no_policy_is_replayed_where_no_timing_is_named(project):
    assert compared("policies={}") == PolicyComparison()
    Conversation.from_file("results/policies/conversation.json", "make it again")


@pytest.mark.long
def test_policies_are_replayed_on_the_timings_that_are_named(project):
    found = compared("policies.seeds=2", "policies.budget=2")
    assert found.tables == {"two-ranks": len(TIMED)}
    names = [each.policy for each in found.summaries]
    assert {"rules", "rules, shuffled", "random", "tpe", "gp", "matrix"} <= {*names}
    assert not [name for name in names if name.startswith("model")]
    assert len(found.replays) == 2 * len(names)
    assert all(len(each.regret) == 3 for each in found.replays)
    assert compared("policies.seeds=2", "policies.budget=2") == found


@pytest.mark.long
def test_a_language_model_is_compared_and_its_answers_are_kept(project):
    kept = Path("results/policies/conversation.json")
    with serving(lambda request, number: (200, says(min(listed(request))))) as server:
        asked = ["agent.judge=http", f"agent.endpoint={server.url}", "agent.model=a-model"]
        found = compared(*asked)
    names = [each.policy for each in found.summaries if each.policy.startswith("model")]
    assert names == ["model", "model, shuffled", "model, no evidence"]
    before = keep(kept)
    assert compared(*REPLAYED) == found
    assert Conversation.from_file(kept, "make it again").exchanges == before.exchanges


def test_a_spent_budget_ends_the_search_without_a_race(params):
    run_round(params, "1")
    proposal, history = run_round(Parameters(overrides=["agent.budget=1"]), "2")
    assert (proposal.arms, proposal.candidates, proposal.space) == ([], [], None)
    assert history.rounds[-1].decision == "none"
    assert "budget of 1 trials is spent" in history.rounds[-1].reason


@pytest.mark.parametrize("number", ["3", "../1", "1.after", "x"])
def test_a_round_that_is_not_in_the_parameters_is_refused(params, number):
    with pytest.raises(UserError):
        propose.main(params, number)
    assert not Path("results/rounds").exists()


@pytest.mark.parametrize(
    ("kept", "quality", "trained"),
    [(0.8, 1.0, 2), (0.8, 1.05, 2), (0.8, 1.1, 1), (0.4, 1.0, 0), (1.2, 1.0, 2)],
)
def test_only_what_is_faster_than_all_that_is_known_is_trained(
    params, monkeypatch, kept, quality, trained
):
    history = begin(["fsdp2"])
    proposal = proposal_of(history, KEPT, INT4_KEPT)
    race = trial_of(proposal, **{f"_{INT4_KEPT.hash()}": 0.5, f"_{KEPT.hash()}": kept}).race
    proposal.to_file("results/rounds/1/proposal.json")
    plans: list[RunPlan] = []

    def evaluated(plan: RunPlan, folder: Path) -> Record:
        plans.append(plan)
        known = make_record("fsdp2", plan.seed)
        return known.model_copy(update={"val_ppl": quality * (known.val_ppl or 0.0)})

    monkeypatch.setattr(trial, "race", lambda plan, output, *_: race.to_file(output))
    monkeypatch.setattr(trial, "train_run", lambda *_, **__: None)
    monkeypatch.setattr(trial, "evaluated", evaluated)
    trial.main(params, "1")
    made = Trial.from_file("results/rounds/1/trial.json", "make it again")
    assert {plan.strategy.hash() for plan in plans} <= {INT4_KEPT.hash()}
    assert [plan.seed for plan in plans] == [0, 1][:trained]
    assert made.race.reason == race.reason
    decided = conclude(history, proposal, made, AGENT)
    fast = KEPT if kept < 0.5 or quality > 1.03 else INT4_KEPT
    assert decided.incumbent == fast.hash()


def test_training_that_fails_is_data_but_a_full_disk_is_not(params, monkeypatch):
    coded = proposal_of(begin(["fsdp2", "ddp"]), INT4_KEPT)
    assert [arm.trained for arm in coded.arms] == [True, False]
    race = trial_of(coded, **{f"_{INT4_KEPT.hash()}": 0.5}).race
    record = make_record("fsdp2", 0, val_ppl=None, val_loss=None, diverged_at=3)
    monkeypatch.setattr(trial, "evaluated", lambda *_: record)
    for error, outcome in (
        (RunFailed("memory", "rank 1: no more memory", "no memory"), "memory"),
        (UserError("gradients: no"), "crash"),
        (None, "diverged"),
    ):

        def do(_: trial.Step, error: Exception | None = error) -> None:
            if error is not None:
                raise error

        (found,) = trial._train(plans.trial(params, "1"), coded, race, do)
        assert (found.outcome, found.measurements) == (outcome, [])

    def full(_: trial.Step) -> None:
        raise StorageError("no space left")

    with pytest.raises(StorageError):
        trial._train(plans.trial(Parameters(overrides=["seeds=[5]"]), "1"), coded, race, full)


def test_ranks_that_fail_in_a_race_leave_a_round_without_one(params, monkeypatch):
    propose.main(params, "1")

    def fails(*_: object) -> None:
        raise RunFailed("crash", "a traceback", "rank 1: ArithmeticError: wrong")

    monkeypatch.setattr(trial, "race", fails)
    trial.main(params, "1")
    decide.main(params, "1")
    after = History.from_file("results/rounds/1/history.json", "make it again")
    (done,) = after.rounds
    assert (done.decision, done.reason) == (
        "reject",
        "the race failed: rank 1: ArithmeticError: wrong",
    )
    second, last = run_round(Parameters(), "2")
    assert second.arms and [each.round for each in last.rounds] == [1, 2]


def test_a_round_on_real_ranks_races_and_decides(project):
    history = begin(["fsdp2", "ddp"], agent=AGENT)
    proposal_of(history, DDP).to_file("results/rounds/1/proposal.json")
    write_records("results/results.jsonl", make_records(["fsdp2", "ddp"], seeds=2))
    own = ["agent.searches.three={world_size: 3}", "rounds.1.search=three"]
    real = Parameters(overrides=["agent.link=null", "agent.repetitions=20", *own])
    trial.main(real, "1")
    decide.main(real, "1")
    after = History.from_file("results/rounds/1/history.json", "make it again")
    (race,) = after.races
    assert {name: arm.outcome for name, arm in race.arms.items()} == dict.fromkeys(
        (history.start, DDP.hash()), "ok"
    )
    assert {run.run for run in race.runs} == {history.start, DDP.hash(), NO_COMMUNICATION}
    assert {run.world_size for run in race.runs} == {3}
    assert (after.search, after.workload.world_size) == ("three", 3)
    assert after.rounds[0].compared[0].label == "ddp, none"
    assert after.incumbent in (history.start, DDP.hash())
    assert not [*Path(".trials").iterdir()]
