"""Killed commands leave no process and no final output, and the rerun succeeds."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlab.core.files import read_json
from tests.pipeline.graphs import pending
from tests.pipeline.workspace import Marked, run, set_params, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RUN = Path("results/train/fsdp2/seed0")
# Snakemake makes a missing file in the middle of the graph again only when it is asked for
MAKE_RUN = ["snakemake", "--cores", "2", str(RUN / "metrics.json")]


@pytest.fixture
def endless(workspace: Path) -> Path:
    """One run is missing and would take for ever."""
    shutil.rmtree(workspace / RUN)
    (workspace / "params.yaml").rename(workspace / "params.good")
    shutil.copy2(workspace / "params.good", workspace / "params.yaml")
    set_params(workspace, train__steps=1_000_000)
    return workspace


@pytest.fixture
def start(endless: Path) -> Iterator[object]:
    started = []

    def start(*command: str) -> Marked:
        """The command, once its ranks are at work."""
        # who runs the tests in the background may ignore some signals, and children inherit that
        marked = Marked(endless, "env", "--default-signal", *command)
        started.append(marked)
        wait_for(lambda: len(ranks(marked)) == 2, 120, "two ranks")
        wait_for(lambda: all(seconds(pid) > 0.5 for pid in ranks(marked)), 120, "ranks at work")
        return marked

    yield start
    for marked in started:
        marked.close()


def stages(marked: Marked) -> list[int]:
    """The stage, the fork of a server that runs it under Snakemake, and the ranks."""
    return sorted(pid for pid, words in marked.family().items() if "-m stages.train" in words)


def ranks(marked: Marked) -> list[int]:
    """Those whose parent has the same command."""
    found = stages(marked)
    return [pid for pid in found if parent(pid) in found]


def parent(pid: int) -> int | None:
    fields = status(pid)
    return int(fields[1]) if fields else None


def seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = status(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return []


def recover(root: Path, *command: str) -> None:
    """With the parameters from before, only what is missing is made again."""
    left = [path.relative_to(root / RUN) for path in (root / RUN).rglob("*") if path.is_file()]
    unfinished = [path for path in left if path.parts[0].startswith(".")]
    assert left == unfinished, "something looks finished"
    shutil.copy2(root / "params.good", root / "params.yaml")
    run(root, *command)
    assert (root / RUN / "final_model/model.safetensors").exists()


def test_killed_stage_ends_its_ranks(endless: Path, start) -> None:
    marked = start("python", "-m", "stages.train", "--run", "fsdp2")
    os.kill(stages(marked)[0], signal.SIGKILL)
    wait_for(lambda: not marked.family(), 15, "no process left")
    recover(endless, *MAKE_RUN)


def test_a_killed_rank_ends_the_stage_with_an_error(endless: Path, start) -> None:
    marked = start("python", "-m", "stages.train", "--run", "fsdp2")
    os.kill(ranks(marked)[1], signal.SIGKILL)
    assert marked.process.wait(60) > 0
    wait_for(lambda: not marked.family(), 15, "no process left")
    recover(endless, *MAKE_RUN)


def test_a_killed_stage_continues_from_its_last_checkpoint(workspace: Path) -> None:
    set_params(workspace, train__steps=200, train__checkpoint={"every": 40})
    checkpoints = workspace / ".work/checkpoints/fsdp2/seed0"
    command = ("python", "-m", "stages.train", "--run", "fsdp2")
    marked = Marked(workspace, *command)
    try:
        wait_for(lambda: any(checkpoints.glob("step-*")), 120, "a checkpoint")
        os.kill(stages(marked)[0], signal.SIGKILL)
        wait_for(lambda: not marked.family(), 15, "no process left")
    finally:
        marked.close()
    assert "fsdp2 seed 0: continues after step " in run(workspace, *command).stdout
    assert read_json(workspace / RUN / "metrics.json")["steps"] == 200
    assert not checkpoints.exists()


# the other signals to each tool: test_lock.py
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_snakemake_is_ended(endless: Path, start, sig: int) -> None:
    marked = start(*MAKE_RUN)
    end(marked, sig)
    wait_for(lambda: not marked.family(), 30, "no process left")
    recover(endless, *MAKE_RUN)
    if sig == signal.SIGKILL:  # nothing was put in order, so what follows is tried too
        run(endless, "snakemake", "--cores", "2")
        assert pending(endless) == set()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_dvc_is_ended(endless: Path, start, sig: int) -> None:
    stage = "train@fsdp2-0"
    marked = start("dvc", "repro", stage)
    end(marked, sig)
    wait_for(lambda: not marked.family(), 30, "no process left")
    # after SIGKILL nothing was put in order, so what follows is tried too
    targets = [] if sig == signal.SIGKILL else [stage]
    recover(endless, "dvc", "repro", *targets)
    assert "up to date" in run(endless, "dvc", "status", *targets).stdout


def end(marked: Marked, sig: int) -> None:
    """Ctrl-C reaches the whole group, other signals the tool alone."""
    if sig == signal.SIGINT:
        os.killpg(marked.process.pid, sig)
    else:
        os.kill(marked.process.pid, sig)
    marked.process.wait(60)
