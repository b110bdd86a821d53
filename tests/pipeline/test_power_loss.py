"""After a power loss there is the old file or the new one, whole: seen in the system calls.

A file is written under another name, flushed, renamed, and its folder is flushed. A new folder
is flushed into the folder above it.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.pipeline.workspace import copy_project, run

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CALLS = "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,openat,open,creat"
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += \d")
OWN = ("data/", "results/", ".work/")


FORKS = """
import contextlib, importlib, os, sys
sys.path.append(sys.argv[1])
import warm
for stage in sys.argv[2:]:
    words = ["-m", *f"stages.{stage}".split()]
    for module in warm._imports(words):
        importlib.import_module(module)
    with contextlib.suppress(FileNotFoundError):
        open(f"/begins/{stage}")  # seen in the log
    if not (pid := os.fork()):
        sys.argv = words
        warm.execute()
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""
"""runs stages, one after the other, in forks of a process that has done their imports"""
BEGIN = re.compile(r'^.*"/begins/([^"]*)".*\n', re.M)


def violations_of_stages(root: Path, *stages: str) -> dict[str, list[str]]:
    """Run stages, and return the `violations` of each."""
    here = str(Path(__file__).parent)
    log = traced(root, "python", "-c", FORKS, here, *stages)
    _, *found = BEGIN.split(log)
    return {name: broken(root, log) for name, log in zip(found[::2], found[1::2], strict=True)}


def violations(root: Path, *command: str) -> list[str]:
    """Run a command; return names that are not flushed, or files that are written in place."""
    return broken(root, traced(root, *command))


def traced(root: Path, *command: str) -> str:
    """Run a command, and return its system calls."""
    log = root.parent / "calls"
    # the kernel passes by the many other calls, at each of which the process would stop
    options = ("-f", "--seccomp-bpf", "-y", "-qq", "-s", "4096", "-o", str(log))
    run(root, "strace", *options, "-e", f"trace={CALLS}", *command, warm=False)
    return log.read_text(errors="replace")


def broken(root: Path, log: str) -> list[str]:
    """Return the `violations` that a log of system calls shows."""
    found, flushed, waiting, begun = [], set(), {}, {}
    for line in log.splitlines():
        process = line.partition(" ")[0]
        if line.endswith(" <unfinished ...>"):  # another process comes in between
            begun[process] = line.removesuffix(" <unfinished ...>")
            continue
        if " resumed>" in line:
            line = begun[process] + line.partition(" resumed>")[2]
        match = CALL.match(line)
        if match is None:
            continue
        call, text = match.groups()
        paths = [_relative(root, path) for path in re.findall(r'"([^"]*)"', text)]
        if call in ("fsync", "fdatasync"):
            done = _relative(root, text.partition("<")[2].rpartition(">")[0])
            flushed.add(done)
            waiting = {path: why for path, why in waiting.items() if str(Path(path).parent) != done}
        elif call.startswith("rename") and _visible(paths[-1]):
            source, target = paths
            if source not in flushed:
                found.append(f"{target}: renamed before {source} is flushed")
            waiting[target] = "its folder is not flushed after the rename"
        elif call.startswith("mkdir") and _visible(paths[-1]):
            waiting[paths[-1]] = "a new folder whose name is not flushed"
        elif "O_CREAT" in text and _visible(paths[-1]):
            found.append(f"{paths[-1]}: written in place")
    return found + [f"{path}: {why}" for path, why in waiting.items()]


def _relative(root: Path, path: str) -> str:
    return path.removeprefix(f"{root}/")


def _visible(path: str) -> bool:
    return path.startswith(OWN) and not any(p.startswith(".") for p in Path(path).parts[1:])


def test_a_write_in_place_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a/data").mkdir(parents=True)
    script = "import os; open('data/x', 'w'); os.rename('data/x', 'data/y')"
    assert violations(tmp_path / "a", "python", "-c", script) == [
        "data/x: written in place",
        "data/y: renamed before data/x is flushed",
        "data/y: its folder is not flushed after the rename",
    ]


@pytest.mark.long
def test_the_first_stages_flush_what_they_write(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    for stage in ("code", "plans", "prepare", "tokenize"):
        assert violations(root, "python", "-m", f"stages.{stage}") == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_stage_flushes_what_it_writes(workspace: Path) -> None:
    stages = (
        "code",
        "plans",
        "prepare",
        "tokenize",
        "train --run fsdp2",
        "profile fsdp2 0",
        "validate fsdp2 0",
        "timing two-ranks",
        "calibrate",
        "forecast",
        "estimate",
        "collect",
        "propose 1",
        "trial 1",
        "decide 1",
        "report",
        "readme",
    )
    assert violations_of_stages(workspace, *stages) == {stage: [] for stage in stages}
