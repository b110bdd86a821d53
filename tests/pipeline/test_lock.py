"""One command at a time works in a tree, and a killed one leaves no lock."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.faults.locks import COMMANDS, PAIRS, compete, make_slow, started
from tests.pipeline.workspace import Marked, run, wait_for


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return make_slow(tmp_path / "project")


def leftovers(root: Path) -> list[Path]:
    return [path for path in (root / "data").glob(".*") if path.is_dir()]


@pytest.mark.parametrize(
    "first", ["snakemake", pytest.param("dvc", marks=pytest.mark.long), "stage"]
)
def test_a_stage_says_who_works_here(slow: Path, first: str) -> None:
    assert compete(slow, first, "stage", None) == first


@pytest.mark.long
@pytest.mark.parametrize("first, second", [pair for pair in PAIRS if pair[1] != "stage"])
def test_of_two_commands_one_works(slow: Path, first: str, second: str) -> None:
    assert compete(slow, first, second, None) == first


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_no_lock(slow: Path, name: str) -> None:
    with started(slow, name) as process:
        wait_for((slow / "at-work").exists, 60, name)
        process.kill()
    (slow / "go").touch()
    for command in COMMANDS.values():
        run(slow, *command)
    assert not leftovers(slow)


@pytest.mark.long
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_ends_a_command_and_its_jobs(slow: Path, name: str, sig: int) -> None:
    if (name, sig) == ("dvc", signal.SIGINT):
        pytest.skip("DVC ignores it while a command runs, which gets it from the terminal too")
    # who runs the tests in the background may ignore some, and children inherit that
    marked = Marked(slow, "env", "--default-signal", *COMMANDS[name])
    try:
        wait_for((slow / "at-work").exists, 60, name)
        os.kill(marked.process.pid, sig)
        wait_for(lambda: not marked.family(), 15, "no process left")
        assert marked.process.wait() != 0
    finally:
        marked.close()
    assert not leftovers(slow)


def test_a_stage_under_nohup_outlives_the_terminal(slow: Path) -> None:
    marked = Marked(slow, "nohup", *COMMANDS["stage"])
    try:
        wait_for((slow / "at-work").exists, 60, "a stage")
        os.kill(marked.process.pid, signal.SIGHUP)
        (slow / "go").touch()
        assert marked.process.wait(60) == 0
    finally:
        marked.close()


def test_a_stage_under_nohup_outlives_the_shell(slow: Path) -> None:
    script = f"nohup {shlex.join(COMMANDS['stage'])} & until [ -e at-work ]; do sleep 0.1; done"
    marked = Marked(slow, "sh", "-c", script)
    try:
        assert marked.process.wait(60) == 0
        (slow / "go").touch()
        wait_for(lambda: not marked.family(), 60, "a stage")
    finally:
        marked.close()
    assert (slow / "data/source.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("option", ["-n", "--summary"])
def test_who_only_reads_does_so_beside_others(slow: Path, option: str) -> None:
    with started(slow, "stage"):
        wait_for((slow / "at-work").exists, 60, "a stage")
        run(slow, "snakemake", option, "--cores", "1", "data/source.json")


@pytest.mark.long
def test_ranks_of_torchrun_are_one_command(slow: Path) -> None:
    (slow / "go").touch()
    with started(slow, "stage") as first:
        first.wait()
    lock = slow / ".shardlab.lock"
    holder = subprocess.Popen(["flock", "--shared", lock, "sleep", "30"])
    try:
        for rank, code in (("1", 0), ("0", 2)):
            done = run(slow, "env", f"RANK={rank}", *COMMANDS["stage"], check=False)
            assert done.returncode == code, done.stdout
    finally:
        holder.kill()
        holder.wait()
