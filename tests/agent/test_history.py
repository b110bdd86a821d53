import json

import pytest

from shardlab.agent.decisions.decision import conclude
from shardlab.agent.records.history import History, initial_history, known_before
from shardlab.agent.records.rounds import Trial
from shardlab.core.errors import UserError
from shardlab.strategy.strategy import parse_strategy
from tests.agent.searches import begin, proposal_of, trial_of
from tests.record_factory import STRATEGIES, make_record, make_records


def test_every_strategy_of_the_matrix_is_measured_from_the_start():
    history = begin()
    assert set(history.measured) == {parse_strategy(each).hash() for each in STRATEGIES.values()}
    assert history.incumbent.source == "run fsdp2"
    assert history.start == history.incumbent.hash
    assert [each.seed for each in history.incumbent.measurements] == [0, 1, 2]


def test_equivalent_runs_are_one_strategy_named_after_the_start():
    twin = [make_record("another-name", seed) for seed in range(3)]
    history = initial_history([*twin, *make_records(["fsdp2"])], "fsdp2")
    assert [entry.source for entry in history.measured.values()] == ["run fsdp2"]


def test_start_must_be_among_the_records():
    with pytest.raises(UserError, match=r"agent\.start: no record of run 'fsdp3'.*'fsdp2'"):
        initial_history(make_records(["fsdp2"]), "fsdp3")


def test_records_of_different_workloads_are_refused():
    mixed = [make_record("fsdp2", 0), make_record("ddp", 0, world_size=4)]
    with pytest.raises(UserError, match="another workload"):
        initial_history(mixed, "fsdp2")


def test_history_accumulates_over_rounds_and_survives_the_file(tmp_path):
    history = begin()
    first = proposal_of(history)
    faster = trial_of(first.chosen, step_ms_p50=20.0, val_ppl=182.0)
    history = conclude(history, first, faster, 0.03)
    assert history.incumbent.source == "round 1"
    assert history.start != history.incumbent.hash

    second = proposal_of(history)
    assert second.chosen_hash not in (None, first.chosen_hash)
    crash = Trial(outcome="crash", detail="rank 1: boom", hash=second.chosen_hash)
    history = conclude(history, second, crash, 0.03)
    assert [each.decision for each in history.rounds] == ["accept", "reject"]
    assert history.incumbent.source == "round 1"
    assert history.measured[second.chosen_hash].outcome == "crash"
    assert len(history.measured) == len(STRATEGIES) + 2

    path = tmp_path / "history.json"
    history.to_file(path)
    assert History.from_file(path) == history
    assert json.loads(path.read_text())["rounds"][1]["trial"]["detail"] == "rank 1: boom"


def test_round_without_a_choice_still_reaches_the_history():
    history = begin()
    stopped = history.model_copy(update={"measured": dict(history.measured)})
    proposal = proposal_of(history).model_copy(update={"chosen": None, "chosen_hash": None})
    after = conclude(stopped, proposal, Trial(outcome="none", detail="no ground"), 0.03)
    assert after.rounds[0].decision == "none"
    assert after.rounds[0].trial.outcome == "none"
    assert after.incumbent == history.incumbent
    assert after.measured == history.measured


def test_trial_of_another_strategy_is_refused():
    history = begin()
    other = trial_of(parse_strategy({"engine": "ddp"}))
    with pytest.raises(UserError, match="run the trial again"):
        conclude(history, proposal_of(history), other, 0.03)


def test_history_older_than_the_matrix_is_refused(tmp_path):
    old = begin(["fsdp2", "ddp"])
    path = tmp_path / "history.json"
    old.to_file(path)
    records = make_records(["fsdp2", "ddp"])
    assert known_before(str(path), "results.jsonl", records, "fsdp2") == old
    with pytest.raises(UserError, match="knows nothing of run ddp-int8"):
        known_before(str(path), "results.jsonl", [*records, *make_records(["ddp-int8"])], "fsdp2")
