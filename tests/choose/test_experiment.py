"""Search as one command: its experiment, ranking and printed strategy."""

import ast
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from shardlab.choose.experiment import (
    ranking_text,
    result_text,
    search_parameters,
)
from shardlab.choose.judge import choose_by_rules
from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.choose.machine import Machine
from tests.pipeline.workspace import ROOT
from tests.strategy.drawn_strategies import documents

TREE = ROOT / "params.yaml"
SLOW = Link(rate="100mbit"), 2, 4


def sections(*arguments):
    params = Parameters(*arguments)
    return {name: params(name) for name in Params.model_fields}


@settings(max_examples=100, deadline=None)
@given(documents())
def test_an_entry_of_params_is_the_strategy_in_yaml_and_in_python(document):
    strategy = parse_strategy(document)
    entry = strategy.canonical().entry("on")
    assert parse_strategy(yaml.safe_load(entry)["strategies"]["on"]).hash() == strategy.hash()
    assert parse_strategy(ast.literal_eval(entry.partition(": ")[2])).hash() == strategy.hash()


START = {"engine": "fsdp2", "reshard_after_forward": False}


@pytest.mark.parametrize(
    ("ranks", "rate", "start", "name"),
    [(2, None, START, "start"), (3, "2.5gbit", None, "fsdp2")],
)
def test_parameters_of_a_search_are_valid_and_complete(tmp_path, ranks, rate, start, name):
    tree = yaml.safe_load(TREE.read_text())
    tree["strategies"]["fsdp2"] = start or tree["strategies"]["fsdp2"]
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    link = Link(rate=rate) if rate else None
    searched = search_parameters(sections(path), link, ranks, 4)
    path.write_text(yaml.safe_dump(searched, sort_keys=False))
    values = sections(path)
    agent, timings, train = values["agent"], values["timings"], values["train"]
    assert (agent.start, agent.link, train.link) == (name, link, None)
    assert {timing.world_size for timing in timings.values()} == {train.world_size} == {ranks}
    assert [timing.link for timing in timings.values()] == [None, *([link] if link else [])]
    expected = parse_strategy(start or {"engine": "fsdp2"})
    assert values["strategies"][name].hash() == expected.hash()
    assert len(values["rounds"]) == agent.budget == 4
    coded = ["fsdp2-int8", "fsdp2-int4"] if link and not start else []
    assert [*values["strategies"]] == [name, *coded]
    assert {*ENGINES} <= {*values["forecast"].runs}


def test_models_are_presets_or_folders(tmp_path, monkeypatch):
    params = sections(TREE)
    for name, model in (("small", {"preset": "small"}), (str(tmp_path), {"config": str(tmp_path)})):
        parameters = search_parameters(params, *SLOW, name)["model"]
        said = {key: value for key, value in parameters.items() if value is not None}
        assert said == {"dropout": 0.0, **model}
    with pytest.raises(UserError, match=r"^--model: 'tinny' is neither a preset .* 'tiny'\?$"):
        search_parameters(params, *SLOW, "tinny")
    monkeypatch.chdir(tmp_path)
    Path("my/model").mkdir(parents=True)
    tree = sections(TREE, ["model={'config': 'my/model'}"])
    assert search_parameters(tree, *SLOW)["model"]["config"] == str(tmp_path / "my/model")


def test_the_ranking_holds_all_that_was_raced_the_fastest_first():
    machine = Machine(rate="100mbit")
    first = machine.propose(machine.begin(), choose_by_rules)
    failed = next(
        candidate for candidate in first.candidates if candidate.id == first.verdict.choice
    )
    machine.faults = {failed.hash: "memory"}
    history, _ = machine.search(choose_by_rules, rounds=2)
    _, rule, *rows = ranking_text(history).splitlines()
    assert {*rule} == {"-"}
    assert len(rows) == len({run.strategy_hash for run in history.results if run.kind == "race"})
    (incumbent,) = [row for row in rows if "* " in row]
    assert incumbent.endswith(f"* {history.incumbent_results.strategy.label()}")
    assert "memory" in rows[-1]
    steps = [history.measured[key].step(history.workload) for key in history.tried]
    assert f"{min(step.ratio for step in steps if step):.3f} (" in rows[0]


def test_the_printed_entry_is_one_of_the_parameters(tmp_path):
    history, _ = Machine(rate="100mbit").search(choose_by_rules, rounds=1)
    text = result_text(history, Path("searches/100mbit-2-ranks"), "reason")
    assert (
        f"its training runs: searches/100mbit-2-ranks/{history.incumbent_results.folder}\n" in text
    )
    entry = yaml.safe_load(text.partition("# for params.yaml\n")[2])
    tree = yaml.safe_load(TREE.read_text())
    tree["strategies"] |= entry["strategies"]
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert Parameters(path)("strategies.100mbit-2-ranks").hash() == history.incumbent
