"""The command that searches without the pipeline."""

import os
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import yaml
from shardlab.search.folder import Step, TimeIsUpError

from shardlab.config.parameters import Parameters
from shardlab.config.search import Agent
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.search.history import History
from stages import search
from tests.commands import said_after, typed
from tests.pipeline.workspace import ROOT, Marked, copy_project, run, stage_outputs, wait_for
from tests.search.searches import DDP, INT4_KEPT, begin, proposal_of

COMMAND = ["python", "-m", "stages.search", "--link", "100mbit", "--ranks", "2"]
SMALL = [
    "--set",
    "agent.repetitions=10",
    "--set",
    "agent.stop_loss=1",
    "--set",
    "seeds=[0]",
    "--set",
    "forecast.space={gradients: [{codec: int8}], weights: []}",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--link", "100"], "--link.rate: link rate '100': write a number and its unit, such as "),
        (["--ranks", "0"], "--ranks: input should be greater than or equal to 2 (found 0)"),
        (["--minutes", "0"], "--minutes: input should be greater than or equal to 1 (found 0)"),
        (["--minutes", "1000000"], "--minutes: input should be less than or equal to 10000"),
        (["--minutes", "ten"], "argument --minutes: expected a whole number (found 'ten')"),
        (["--name", "../mine"], "--name: string should match pattern"),
        (["--model", "tinny"], "--model: 'tinny' is no preset and no folder with a config.json"),
        (["--set", "agent.start=dp"], "agent.start: 'dp' is no run; did you mean 'fsdp2'?"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    tmp_path: Path, options: list[str], message: str
) -> None:
    shutil.copy2(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    command = typed(tmp_path / "command", tmp_path, "stages.search", *COMMAND[3:], *options)
    assert command.wait() == 2
    (line,) = command.said().splitlines()
    assert line.startswith(f"search: error: {message}")
    assert not (tmp_path / "searches").exists() and not (tmp_path / "data").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_missing_rights_are_one_line_before_anything_runs(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        with pytest.raises(search.UserError, match="run as root, or put `unshare"):
            search.main(Parameters(), link="100mbit", ranks=2)

    monkeypatch.chdir(project)
    said_after(partial(os.seteuid, 65534), call, tmp_path)
    assert not (project / "searches").exists() and stage_outputs(project) == []


class Recorded:
    """A folder of a search that only notes which stages it is to run.

    Training the start took 30 s, the timing on the link of the search `timing_s`.
    """

    def __init__(self, path: Path, left_s: float, timing_s: float = 10.0) -> None:
        self.path, self.left_s, self._timing_s = path, left_s, timing_s
        self.steps: list[Step] = []

    def parameters(self) -> Parameters:
        return Parameters(ROOT / "params/quick.yaml")

    def seconds(self, *stages: str) -> float:
        if not stages:
            return 60.0
        training = ("train fsdp2 ", "profile fsdp2 ", "validate fsdp2 ")
        return {training: 30.0, ("timing link",): self._timing_s}[stages]

    def has(self, step: Step) -> bool:
        return False

    def run(self, step: Step) -> None:
        self.steps.append(step)


@pytest.mark.parametrize(
    ("strategies", "left_s", "limit"),
    [
        ([INT4_KEPT], 1000, 300),
        ([INT4_KEPT], 100, 70),
        ([INT4_KEPT], 70, 40),
        ([INT4_KEPT], 69, None),
        ([DDP], 69, 69),
        ([DDP], 40, 40),
        ([DDP], 39, None),
        ([], 1, 1),
    ],
)
def test_a_round_begins_if_its_race_and_its_training_can_end(
    tmp_path: Path, strategies: list[Strategy], left_s: float, limit: int | None
) -> None:
    proposal = proposal_of(begin(["fsdp2", "ddp"]), *strategies)
    proposal.to_file(tmp_path / "results/rounds/3/proposal.json")
    folder = Recorded(tmp_path, left_s)
    if limit is None:
        with pytest.raises(TimeIsUpError):
            search._round(folder, "3", Agent(), "link")
        assert [step.name for step in folder.steps] == ["propose 3"]
        return
    search._round(folder, "3", Agent(), "link")
    assert [step.name for step in folder.steps] == ["propose 3", "trial 3", "decide 3"]
    assert folder.steps[1].overrides == (f"agent.trial_timeout_s={limit}",)


def test_the_printed_entry_is_one_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "read_all", lambda *_: [])
    history, params = begin(["fsdp2"]), (ROOT / "params/quick.yaml").read_text()
    search.show(Recorded(tmp_path / "100mbit-2-ranks", 0), history, "reason")
    [comment, key, *entry] = capsys.readouterr().out.partition("# ")[2].splitlines(keepends=True)
    assert (comment, key) == ("for params.yaml\n", "strategies:\n")
    path = tmp_path / "params.yaml"
    path.write_text(params.replace(f"\n{key}", "".join(["\n", key, *entry])))
    assert Parameters(path)("strategies.100mbit-2-ranks").hash() == history.incumbent


@pytest.mark.parametrize(("left_s", "limit"), [(3600, 400), (400, 400), (399, None)])
def test_a_race_on_a_slow_link_gets_more_than_the_default(
    tmp_path: Path, left_s: float, limit: int | None
) -> None:
    proposal_of(begin(["fsdp2", "ddp"]), DDP).to_file(tmp_path / "results/rounds/3/proposal.json")
    folder = Recorded(tmp_path, left_s, timing_s=100)
    with nullcontext() if limit else pytest.raises(TimeIsUpError):
        search._round(folder, "3", Agent(), "link")
    found = [step.overrides for step in folder.steps if step.name == "trial 3"]
    assert found == ([(f"agent.trial_timeout_s={limit}",)] if limit else [])


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_search_is_interrupted_goes_on_and_then_repeats_nothing(
    permitted: None, project: Path
) -> None:
    command = [*COMMAND, "--minutes", "20", *SMALL]
    folder = project / "searches/100mbit-2-ranks"
    calibration = folder / "results/calibration.json"
    marked = Marked(project, "env", "--default-signal", *command)
    try:
        wait_for((folder / "results/timings/loopback.jsonl").exists, 600, "a timing")
        assert "python -m stages.search --link 100mbit --ranks 2 --minutes 20" in (
            run(project, "python", "-m", "stages.prepare", check=False).stdout
        )
        os.killpg(marked.process.pid, signal.SIGINT)
        assert marked.process.wait(30) == 130
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    before = calibration.stat().st_mtime_ns
    first = run(project, *command).stdout
    assert calibration.stat().st_mtime_ns == before
    made = times(folder)
    again = run(project, *command).stdout
    assert times(folder) == made
    shown = again[: again.index("\nsearch: ")]
    assert shown in first
    rounds = sorted((folder / "results/rounds").iterdir(), key=lambda each: int(each.name))
    history = History.from_file(rounds[-1] / "history.json", "make it again")
    assert history.races and history.rounds[-1].decision == "none"
    assert max(map(len, shown.splitlines())) <= 100
    (entry,) = yaml.safe_load(shown.partition("\n# for params.yaml")[2].partition("\n")[2])[
        "strategies"
    ].items()
    assert entry[0] == folder.name
    assert parse_strategy(entry[1]).hash() == history.incumbent
    refused = run(project, *command, "--set", "train.steps=13", check=False)
    assert refused.returncode == 2
    assert (
        "100mbit-2-ranks: of other parameters (train.steps: 12 there, 13 now): " in refused.stdout
    )
