import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Proposal, Trial
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.experiment.parameters import Parameters
from shardlab.records.run import write_records
from stages import decide, propose
from tests.agent.searches import trial_of
from tests.record_factory import STRATEGIES, make_records


@pytest.fixture
def params(tmp_path, monkeypatch) -> Parameters:
    """A folder with the matrix trained and two rounds to go."""
    monkeypatch.chdir(tmp_path)
    write_records("results/results.jsonl", make_records())
    tree = {
        "agent": {"start": "fsdp2", "memory_limit_gb": 4.0},
        "rounds": {
            "1": {"after": "results/results.jsonl"},
            "2": {"after": "results/rounds/1/history.json"},
        },
        "last_round": "2",
        "strategies": STRATEGIES,
        "runs": list(STRATEGIES),
        "train": {},
    }
    Path("params.yaml").write_text(yaml.safe_dump(tree))
    return Parameters()


def save_trial(number: str, **changes) -> None:
    proposal = Proposal.from_file(f"results/rounds/{number}/proposal.json")
    trial = (
        trial_of(proposal.chosen, **changes)
        if proposal.chosen
        else Trial(outcome="none", detail="nothing")
    )
    trial.to_file(f"results/rounds/{number}/trial.json")


def test_two_rounds_build_on_each_other(params):
    propose.main(params, "1")
    save_trial("1", step_ms_p50=20.0, val_ppl=182.0)
    decide.main(params, "1")
    propose.main(params, "2")
    save_trial("2", step_ms_p50=90.0)
    decide.main(params, "2")
    history = History.from_file("results/rounds/2/history.json")
    assert [each.decision for each in history.rounds] == ["accept", "reject"]
    assert history.incumbent.source == "round 1"
    assert read_json("results/rounds/2/proposal.json")["incumbent_hash"] == history.incumbent.hash


def test_a_repeated_proposal_is_the_same_file(params):
    propose.main(params, "1")
    path = Path("results/rounds/1/proposal.json")
    first = path.read_bytes()
    path.unlink()
    propose.main(params, "1")
    assert path.read_bytes() == first


def test_spent_budget_flows_through_to_the_history(params):
    propose.main(params, "1")
    save_trial("1")
    decide.main(params, "1")
    tight = Parameters(overrides=["agent.budget=1"])
    propose.main(tight, "2")
    save_trial("2")
    decide.main(tight, "2")
    last = History.from_file("results/rounds/2/history.json").rounds[-1]
    assert (last.decision, last.trial.outcome, last.candidates) == ("none", "none", [])
    assert "budget of 1 trials is spent" in last.reason


@pytest.mark.parametrize("number", ["3", "../1", "1.after", "x"])
def test_a_round_that_is_not_in_the_parameters_is_refused(params, number):
    with pytest.raises(UserError):
        propose.main(params, number)
    assert not Path("results/rounds").exists()


def test_the_agent_starts_without_torch():
    code = (
        "import importlib, pkgutil, sys, shardlab.agent as agent\n"
        "for each in pkgutil.iter_modules(agent.__path__):\n"
        "    importlib.import_module(f'shardlab.agent.{each.name}')\n"
        "sys.exit('torch' in sys.modules or 'shardlab.train' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
