"""Search as one command: its parameters, folder and stages, ranking and printed strategy."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from shardlab.search.folder import SearchFolder, Step, TimeIsUpError, run_stage
from shardlab.search.parameters import Request, search_parameters
from shardlab.search.ranking import ranking, ranking_text
from shardlab.search.written import written
from tests.search.racing import RacingMachine

from shardlab.config.link import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Params
from shardlab.config.strategy import parse_strategy
from shardlab.core.errors import UserError
from shardlab.core.process import is_running
from shardlab.search import folder as folders
from shardlab.search.judge import RuleJudge
from tests.config.drawn_strategies import documents
from tests.pipeline.workspace import ROOT, wait_for

TREE = ROOT / "params.yaml"
SLOW = Request(Link(rate="100mbit"), 2)


def removed(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The document without each of its settings."""
    found = []
    for key, value in document.items():
        rest = {name: each for name, each in document.items() if name != key}
        found += [rest] if key != "engine" else []
        found += (
            [rest | {key: inner} for inner in removed(value)] if isinstance(value, dict) else []
        )
    return found


@given(documents())
def test_a_written_strategy_has_the_same_hash_and_only_what_it_needs(document):
    strategy = parse_strategy(document)
    found = yaml.safe_load(yaml.safe_dump(written(strategy.canonical())))
    assert parse_strategy(found).hash() == strategy.hash()
    for shorter in removed(found):
        try:
            assert parse_strategy(shorter).hash() != strategy.hash(), shorter
        except UserError:
            continue


def test_a_written_strategy_is_an_entry_of_the_parameters(tmp_path):
    document = {"engine": "ddp", "gradients": {"codec": "int4:group=128", "error_feedback": True}}
    found = written(parse_strategy(document).canonical())
    assert found == document
    tree = yaml.safe_load(TREE.read_text())
    tree["strategies"]["found"] = found
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert Parameters(path)("strategies.found").hash() == parse_strategy(document).hash()


START = {"engine": "fsdp2", "reshard_after_forward": False}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rate", [None, "2.5gbit"])
@pytest.mark.parametrize(("start", "name"), [(None, "fsdp2"), (START, "start")])
def test_parameters_of_a_search_are_valid_and_complete(tmp_path, ranks, rate, start, name):
    tree = yaml.safe_load(TREE.read_text())
    tree["strategies"]["fsdp2"] = start or tree["strategies"]["fsdp2"]
    path, found = tmp_path / "params.yaml", tmp_path / "found.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    link = Link(rate=rate) if rate else None
    derived = search_parameters(Parameters(path), Request(link, ranks))
    found.write_text(yaml.safe_dump(derived, sort_keys=False))
    params = Parameters(found)
    given = dict(zip(Params.model_fields, params(*Params.model_fields), strict=True))
    agent, timings, train = given["agent"], given["timings"], given["train"]
    assert (agent.start, agent.link, train.link) == (name, link, None)
    assert {timing.world_size for timing in timings.values()} == {train.world_size} == {ranks}
    assert [timing.link for timing in timings.values()] == [None, *([link] if link else [])]
    expected = parse_strategy(start or {"engine": "fsdp2"})
    assert given["strategies"][name].hash() == expected.hash()
    assert len(given["rounds"]) == agent.budget
    coded = ["fsdp2-int8", "fsdp2-int4", "fsdp2-topk"] if link and not start else []
    assert [*given["strategies"]] == [name, *coded]


def test_models_are_presets_or_folders(tmp_path):
    params = Parameters(TREE)
    for name, model in (("small", {"preset": "small"}), (str(tmp_path), {"config": str(tmp_path)})):
        found = search_parameters(params, SLOW._replace(model=name))["model"]
        assert {key: value for key, value in found.items() if value is not None} == model
    with pytest.raises(UserError, match=r"^--model: 'tinny' is no preset .* 'tiny'\?$"):
        search_parameters(params, SLOW._replace(model="tinny"))


def test_paths_of_the_model_hold_in_the_folder_of_a_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    own = Parameters(TREE, ["model={'config': 'mine'}"])
    assert search_parameters(own, SLOW)["model"]["config"] == str(tmp_path / "mine")


def test_the_ranking_holds_all_that_was_raced_the_fastest_first():
    machine = RacingMachine(rate="100mbit", noise=0.1)
    first = machine.begin()
    offered = machine.propose(first, RuleJudge())
    failed = next(each for each in offered.candidates if each.id == offered.verdict.choice)
    machine.faults = {failed.strategy.hash(): "memory"}
    history = machine.search(RuleJudge(), rounds=2).history
    ranked = ranking(history, [])
    raced = {key for race in history.races for key in race.arms}
    assert len(ranked) == len(raced)
    ratios = [each.step.ratio for each in ranked if each.step]
    assert ratios == sorted(ratios) and len(ratios) == len(ranked) - 1
    assert [each.label for each in ranked if each.held] == [history.held.strategy.label()]
    assert (ranked[-1].label, ranked[-1].outcome) == (failed.label, "memory")
    (start,) = [each for each in ranked if each.step and each.step.low == each.step.high == 1]
    for each in ranked[:-1]:
        # medians of one race, of which the ratio is a mean
        if start.source == each.source:
            assert each.step_ms == pytest.approx(start.step_ms * each.step.ratio, rel=0.2)
    assert any(each.predicted_ms is not None for each in ranked)
    text = ranking_text(ranked)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert [line[0] for line in text.splitlines()].count("*") == 1
    words = " ".join(text.split())
    assert "memory" in words and "round 2" in words


def test_steps_of_timings_are_ranked_by_their_source():
    machine = RacingMachine()
    timed = [run for run in machine.timed if run.timing == "two-ranks"]
    ranked = ranking(machine.begin(timed=timed), timed)
    medians = {run.run: sorted(run.step_ms)[len(run.step_ms) // 2] for run in timed}
    assert {each.source for each in ranked} == {"timing two-ranks"}
    for each in ranked:
        engine = each.label.split(",")[0]
        assert each.step_ms == pytest.approx(medians[engine], rel=0.1)


# --- the folder and its stages ---------------------------------------------------------------


def writes(params: Parameters, text: str = "") -> None:
    Path("results").mkdir(exist_ok=True)
    with Path("results/made").open("a") as file:
        file.write(f"{text}{params('train').steps}\n")


def refuses(params: Parameters) -> None:
    raise UserError("no such thing: make one")


def breaks(params: Parameters) -> None:
    raise RuntimeError("a bug")


def waits(params: object) -> None:
    Path("waiting").write_text(str(os.getpid()))
    time.sleep(60)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data/tokens").mkdir(parents=True)
    Path("data/tokens/manifest.json").write_text("{}")
    return tmp_path


def opened(minutes: float = 1.0, **changes: Any) -> SearchFolder:
    tree = search_parameters(Parameters(TREE, [f"{k}={v}" for k, v in changes.items()]), SLOW)
    folder = SearchFolder(Path("searches/mine"), tree, 60 * minutes)
    folder.begin(Path("data"))
    return folder


def test_a_stage_runs_in_the_folder_and_is_not_repeated(project):
    step = Step(writes, "results/made", ("a",), overrides=("train.steps=77",))
    for _ in range(2):
        folder = opened()
        folder.run(step)
        assert (project / "searches/mine/results/made").read_text() == "a77\n"
    assert Path("searches/mine/data/tokens/manifest.json").is_file()
    assert not Path("results").exists()
    assert 0 < folder.seconds() == folder.seconds("test_command a") < 60
    assert folder.left_s == pytest.approx(60 - folder.seconds())


def test_other_parameters_or_tokens_under_the_same_name_are_refused(project):
    opened()
    there = r"^searches/mine: of other parameters \(train.steps: 100 there, 7 now\): choose another"
    with pytest.raises(UserError, match=there):
        opened(**{"train.steps": 7, "train.untimed_steps": 1})
    Path("data/tokens/manifest.json").write_text("{ }")
    with pytest.raises(UserError, match=r"^searches/mine: of other tokens than data: choose"):
        opened()


def test_errors_of_a_stage_reach_the_user(project, capfd):
    with pytest.raises(UserError, match=r"^test_command: no such thing: make one$"):
        opened().run(Step(refuses, "never"))
    with pytest.raises(SystemExit):
        opened().run(Step(breaks, "never"))
    said = capfd.readouterr().err
    assert "RuntimeError: a bug" in said
    assert said.splitlines()[-1].startswith("search: test_command: failed, as shown above")


def test_a_stage_ends_when_the_time_is_up_and_later_ones_do_not_begin(project):
    folder, slow = opened(minutes=1 / 60), Step(waits, "never")
    with pytest.raises(TimeIsUpError):
        folder.run(slow)
    assert folder.left_s <= 0
    pid = Path("searches/mine/waiting")
    pid.unlink(missing_ok=True)  # the child may not have come so far
    with pytest.raises(TimeIsUpError):
        folder.run(slow)
    assert not pid.exists()


def test_a_stage_ends_with_the_command(project):
    work = partial(run_stage, "waits", partial(waits, None), Path())
    command, shown = folders._CONTEXT.Process(target=work), Path("waiting")
    command.start()
    wait_for(lambda: shown.exists() and shown.read_text().isdecimal(), 60, "a stage")
    assert command.pid is not None
    os.kill(command.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(int(shown.read_text())), 15, "no process left")
    command.join()
