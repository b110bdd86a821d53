"""Killed stages and tools leave nothing that looks finished, and a rerun goes on."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from shardlab.core.files import read_json
from tests.pipeline.graphs import pending
from tests.pipeline.workspace import run, set_params, speaking, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RUN = Path("results/train/fsdp2/seed0")
TRAIN = ("python", "-m", "stages.train", "--run", "fsdp2")


class Stage(NamedTuple):
    """Outputs of a command; the last of them is written last."""

    command: str
    outputs: tuple[str, ...]
    same: tuple[str, ...] = ()
    """outputs without times: a rerun writes the same bytes"""


CORPUS = ("data/corpus.json", "data/source.json")
TOKENS = ("data/tokens", "data/tokenizer.json", "data/statistics.json")
QUALITY = "results/validate/fsdp2/seed0.json"
PROFILE = ("results/profile/fsdp2/seed0.csv", "results/profile/fsdp2/seed0.json")
WEIGHTS = str(RUN / "final_model/model.safetensors")
STAGES = [
    Stage("prepare", CORPUS, CORPUS),
    Stage("tokenize", TOKENS, TOKENS[1:]),
    Stage("train --run fsdp2", (str(RUN), str(RUN / "metrics.json")), (WEIGHTS,)),
    Stage("profile fsdp2", PROFILE, PROFILE),
    Stage("validate fsdp2", (QUALITY,), (QUALITY,)),
    Stage("timing two-ranks", ("results/timings/two-ranks.jsonl",)),
    Stage("trial 1", (".trials", "results/rounds/1/trial.json")),
    Stage("report", ("results/report/report.html",)),
]


def start(root: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, **speaking(root))


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def remove(root: Path, names: tuple[str, ...]) -> None:
    for path in (root / name for name in names):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def files(root: Path) -> set[Path]:
    """Files of data and results, hidden ones included."""
    found = [path for name in ("data", "results") for path in (root / name).rglob("*")]
    return {path.relative_to(root) for path in found if path.is_file()}


def is_whole(path: Path) -> bool:
    text = path.read_text()
    if path.suffix == ".html":
        return text.rstrip().endswith("</html>")
    return all(
        json.loads(part) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])
    )


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.command.split()[0])
def test_a_killed_stage_leaves_nothing_that_looks_finished(workspace: Path, stage: Stage) -> None:
    command = ("python", "-m", f"stages.{stage.command.split()[0]}", *stage.command.split()[1:])
    begin = time.monotonic()
    run(workspace, *command)
    seconds = time.monotonic() - begin
    before, last = files(workspace), workspace / stage.outputs[-1]
    expected = {name: (workspace / name).read_bytes() for name in stage.same}
    for moment in (0.5, 0.9):
        remove(workspace, stage.outputs)
        process = start(workspace, *command)
        time.sleep(moment * seconds)
        kill(process)
        assert not last.exists() or is_whole(last)
    said = run(workspace, *command).stdout
    assert files(workspace) == before, said
    assert {name: (workspace / name).read_bytes() for name in stage.same} == expected


def test_a_killed_run_continues_from_its_last_checkpoint(workspace: Path) -> None:
    set_params(workspace, train__steps=200, train__checkpoint={"every": 40})
    checkpoints = workspace / ".work/checkpoints/fsdp2/seed0"
    process = start(workspace, *TRAIN)
    wait_for(lambda: any(checkpoints.glob("step-*")), 120, "a checkpoint")
    kill(process)
    assert "fsdp2 seed 0: continues after step " in run(workspace, *TRAIN).stdout
    assert read_json(workspace / RUN / "metrics.json")["steps"] == 200
    assert not checkpoints.exists()


@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_the_rerun_of_a_killed_tool_goes_on(workspace: Path, tool: str) -> None:
    shutil.copy2(workspace / "params.yaml", workspace / "params.good")
    set_params(workspace, train__steps=1_000_000)
    remove(workspace, (str(RUN), "logs/tensorboard"))
    # Snakemake makes a missing file in the middle of the graph again only when it is asked for
    only = {
        "snakemake": ("snakemake", "--cores", "2", str(RUN / "metrics.json")),
        "dvc": ("dvc", "repro", "train@fsdp2-0"),
    }
    process = start(workspace, *only[tool])
    scalars = workspace / "logs/tensorboard/fsdp2/seed0"
    wait_for(lambda: any(scalars.glob("events.*")), 120, "ranks at work")
    kill(process)
    assert not [path for path in files(workspace) if RUN in path.parents]
    shutil.copy2(workspace / "params.good", workspace / "params.yaml")
    run(workspace, *only[tool])
    assert (workspace / WEIGHTS).exists()
    if tool == "snakemake":
        run(workspace, "snakemake", "--cores", "2")
        assert pending(workspace) == set()
    else:
        run(workspace, "dvc", "repro")
        assert "up to date" in run(workspace, "dvc", "status").stdout
