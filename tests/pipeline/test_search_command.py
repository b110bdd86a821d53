"""The command that searches without an experiment of one's own."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from shardlab.choose.history import History
from shardlab.core.errors import UserError
from shardlab.strategy.document import parse_strategy
from stages import search
from tests.commands import said_after, typed
from tests.pipeline.workspace import ROOT, copy_project, run, stage_outputs

COMMAND = ["python", "-m", "shardlab", "search", "--link", "100mbit", "--world-size", "2"]
SMALL = [
    *("--set", "agent.repetitions=10", "--set", "agent.stop_loss=1", "--set", "seeds=[0]"),
    *("--set", "forecast.space={gradients: [{codec: int8}], weights: []}"),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--link", "100"], "--link.rate: link rate '100': write a number and its unit, such as "),
        (
            ["--world-size", "0"],
            "--world-size: input should be greater than or equal to 2 (found 0)",
        ),
        (["--minutes", "0"], "--minutes: input should be greater than or equal to 1 (found 0)"),
        (["--minutes", "ten"], "argument --minutes: invalid int value: 'ten'"),
        (["--name", "../mine"], "--name: string should match pattern"),
        (
            ["--model", "tinny"],
            "--model: 'tinny' is neither a preset nor a folder with a config.json",
        ),
        (["--set", "agent.start=dp"], "agent.start: 'dp' is no run; did you mean 'fsdp2'?"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    tmp_path: Path, options: list[str], message: str
) -> None:
    shutil.copy2(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    command = typed(tmp_path / "command", tmp_path, "shardlab", *COMMAND[3:], *options)
    assert command.wait() == 2
    (line,) = command.said().splitlines()
    assert line.startswith(f"search: error: {message}")
    assert not (tmp_path / "searches").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_missing_rights_are_one_line_before_anything_runs(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        with pytest.raises(UserError, match="run as root, or put `unshare"):
            search.main(link="100mbit", world_size=2)

    monkeypatch.chdir(project)
    said_after(partial(os.seteuid, 65534), call, tmp_path)
    assert not (project / "searches").exists() and stage_outputs(project) == []


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_search_ends_with_a_strategy_and_repeats_nothing(permitted: None, project: Path) -> None:
    command = [*COMMAND, "--minutes", "20", *SMALL]
    folder = project / "searches/100mbit-2-ranks"
    first = run(project, *command).stdout
    histories = sorted(folder.glob("results/rounds/*/history.json"))
    made = {path: path.stat().st_mtime_ns for path in histories}
    shown = first[first.index("tiny, 2 ranks, link 100mbit: ") : first.index("\nsearch: ")]
    assert shown in run(project, *command).stdout
    assert {path: path.stat().st_mtime_ns for path in histories} == made
    history = History.from_file(histories[-1], "make it again")
    assert history.races and history.rounds[-1].decision == "none"
    (entry,) = yaml.safe_load(shown.partition("\n# for params.yaml")[2])["strategies"].items()
    assert entry[0] == folder.name
    assert parse_strategy(entry[1]).hash() == history.incumbent
