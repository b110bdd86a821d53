"""Killed stages and tools leave nothing that looks finished, and a rerun goes on."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from shardlab.core.files import read_json
from tests.pipeline.workspace import run, set_params, speaking, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RUN = Path("results/train/fsdp2/seed0")
TRAIN = ("python", "-m", "shardlab", "train", "--run", "fsdp2")


class Stage(NamedTuple):
    """Outputs of a command, written in this order; a rerun writes the same bytes but for times."""

    command: str
    outputs: tuple[str, ...]
    timed: tuple[str, ...] = ()


WEIGHTS = str(RUN / "final_model/model.safetensors")
STAGES = [
    Stage("tokenize", ("data/tokens", "data/tokenizer.json", "data/statistics.json")),
    Stage("train --run fsdp2", (WEIGHTS, str(RUN / "metrics.json")), (str(RUN / "metrics.json"),)),
    Stage("profile fsdp2", ("results/profile/fsdp2/seed0.csv", "results/profile/fsdp2/seed0.json")),
    Stage("timing two-ranks", (TIMED := "results/timings/two-ranks.jsonl",), (TIMED,)),
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


def contents(root: Path, stage: Stage) -> dict[str, bytes]:
    """Bytes of the files that a rerun makes equal."""
    names = [name for name in stage.outputs if name not in stage.timed]
    paths = [path for name in names for path in files_of(root / name)]
    return {str(path): path.read_bytes() for path in paths}


def files_of(path: Path) -> list[Path]:
    return sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]


def is_whole(path: Path) -> bool:
    text = path.read_text()
    return all(
        json.loads(part) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])
    )


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.command.split()[0])
def test_a_killed_stage_leaves_nothing_that_looks_finished(workspace: Path, stage: Stage) -> None:
    name, *arguments = stage.command.split()
    command = ("python", "-m", "shardlab", name, *arguments)
    before, expected = files(workspace), contents(workspace, stage)
    remove(workspace, stage.outputs)
    others = files(workspace)
    process = start(workspace, *command)
    # unfinished files have names of their own
    wait_for(lambda: files(workspace) != others, 120, "a first file")
    kill(process)
    last = workspace / stage.outputs[-1]
    assert not last.exists() or is_whole(last)
    said = run(workspace, *command).stdout
    assert files(workspace) == before, said
    assert contents(workspace, stage) == expected


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
def test_a_killed_search_goes_on_after_its_last_run(workspace: Path, tool: str) -> None:
    """And what it found with other settings stays."""
    set_params(workspace, train__steps=120, tune__learning_rates=[0.003, 0.01, 0.03])
    output, work = workspace / "results/tune/stock.jsonl", workspace / ".work/tune/stock"
    before = output.read_bytes()
    shutil.rmtree(work)
    only = {
        "snakemake": ("snakemake", "--cores", "2", "results/tune/stock.jsonl"),
        "dvc": ("dvc", "repro", "tune@stock"),
    }
    process = start(workspace, *only[tool])
    wait_for(lambda: any(work.glob("*.json")), 120, "a run")
    kill(process)
    assert output.read_bytes() == before
    (first,) = work.glob("*.json")
    written = first.stat().st_mtime_ns
    run(workspace, *only[tool])
    log = (workspace / "logs/tune/stock.log").read_text()
    assert log.count("(taken over from revision ") == 1 and first.stat().st_mtime_ns == written
    keys = [json.loads(line)["key"] for line in output.read_text().splitlines()]
    assert first.stem in keys and len(keys) == len({*keys}) > 2
    former = {json.loads(line)["key"] for line in before.splitlines()}
    assert {path.stem for path in work.glob("*.json")} == {*keys} | former


@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_the_rerun_of_a_killed_tool_goes_on(workspace: Path, tool: str) -> None:
    shutil.copy2(workspace / "params.yaml", workspace / "params.good")
    set_params(workspace, train__steps=1_000_000)
    remove(workspace, (str(RUN), "logs/tensorboard"))
    # one stage: what follows from it is not of this test
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
    if tool == "dvc":
        assert "up to date" in run(workspace, "dvc", "status", "train@fsdp2-0").stdout
