"""One command at a time works in a tree, and a killed one leaves no lock."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from tests.pipeline.workspace import copy_project, run, speaking, wait_for

COMMANDS = {
    "snakemake": ["snakemake", "--cores", "1", "data/source.json"],
    "dvc": ["dvc", "repro", "prepare"],
    "stage": ["python", "-m", "shardlab", "prepare"],
}
PAIRS = [
    ("snakemake", "stage"),
    ("stage", "stage"),
    pytest.param("snakemake", "dvc", marks=pytest.mark.long),
    pytest.param("dvc", "snakemake", marks=pytest.mark.long),
    pytest.param("dvc", "dvc", marks=pytest.mark.long),
]
SLOW = """    import time
    while not Path("go").exists():
        Path("at-work").touch()
        time.sleep(0.01)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A project whose first stage works until there is a file `go`."""
    root = copy_project(tmp_path / "project")
    stage = root / "stages/prepare.py"
    work = "    source = prepare("
    stage.write_text(stage.read_text().replace(work, SLOW + work, 1))
    return root


@contextmanager
def started(root: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, whose stage is at work."""
    # who runs the tests in the background may ignore signals, and children inherit that
    process = subprocess.Popen(["env", "--default-signal", *command], **speaking(root))
    try:
        wait_for((root / "at-work").exists, 60, "a stage at work")
        yield process
    finally:
        process.kill()
        process.communicate()


def is_idle(root: Path) -> bool:
    (root / "at-work").unlink(missing_ok=True)
    time.sleep(0.3)
    return not (root / "at-work").exists()


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_second_command_says_who_works_here(slow: Path, first: str, second: str) -> None:
    with started(slow, *COMMANDS[first]) as working:
        refused = run(slow, *COMMANDS[second], check=False)
        assert refused.returncode == (255 if second == "dvc" else 2), refused.stdout
        # DVC's own words, before it removes any output
        if second == "dvc" and first == "snakemake":
            assert "Unable to acquire lock" in refused.stdout
        elif second == "dvc" and first == "dvc":
            assert f"(PID {working.pid})" in refused.stdout
        else:
            who = r"shardlab prepare \(pid \d+"
            if first == "snakemake":
                who = rf"snakemake --cores 1 data/source\.json \(pid {working.pid}"
            lines = [line for line in refused.stdout.splitlines() if "works here" in line]
            assert len(lines) == 1 and re.search(rf"error: python3? .*{who} on .*: wait", lines[0])
        (slow / "go").touch()
        said, _ = working.communicate(timeout=60)
        assert working.returncode == 0, said
    assert (slow / "data/source.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_no_lock(slow: Path, name: str) -> None:
    with started(slow, *COMMANDS[name]) as process:
        process.kill()
        process.wait()
        wait_for(lambda: is_idle(slow), 15, "the end of its job")
    (slow / "go").touch()
    for command in COMMANDS.values():
        run(slow, *command)
    assert not [path for path in (slow / "data").glob(".*") if path.is_dir()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("snakemake", signal.SIGTERM),
        ("snakemake", signal.SIGINT),
        ("dvc", signal.SIGTERM),
        ("stage", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_command_and_its_jobs(slow: Path, name: str, number: int) -> None:
    with started(slow, *COMMANDS[name]) as process:
        process.send_signal(number)
        assert process.wait(15) != 0
        wait_for(lambda: is_idle(slow), 15, "the end of its job")


@pytest.mark.long
def test_an_interrupted_run_says_how_to_go_on(slow: Path) -> None:
    with started(slow, "python", "-m", "shardlab", "run", "data/source.json") as process:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=15)
        assert "interrupted: the same command goes on from there" in said.splitlines()
        assert process.returncode == 128 + signal.SIGINT
        wait_for(lambda: is_idle(slow), 15, "the end of its job")


def test_a_stage_under_nohup_outlives_the_terminal(slow: Path) -> None:
    with started(slow, "nohup", *COMMANDS["stage"]) as process:
        process.send_signal(signal.SIGHUP)
        (slow / "go").touch()
        assert process.wait(60) == 0


@pytest.mark.long
def test_who_only_reads_does_so_beside_others(slow: Path) -> None:
    with started(slow, *COMMANDS["stage"]):
        run(slow, "snakemake", "-n", "--cores", "1", "data/source.json")


@pytest.mark.long
def test_ranks_of_torchrun_are_one_command(slow: Path) -> None:
    (slow / "go").touch()
    with FileLock(slow / ".shardlab.lock"):
        # RANK alone is of no launcher: such a command starts all ranks
        for variables, code in (
            ("RANK=1 WORLD_SIZE=2", 0),
            ("RANK=0 WORLD_SIZE=2", 2),
            ("RANK=1", 2),
        ):
            done = run(slow, "env", *variables.split(), *COMMANDS["stage"], check=False)
            assert done.returncode == code, done.stdout
