"""Temporary copies of the project, and commands and processes in them."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
PARTS = [
    ".dvc/.gitignore",
    ".dvc/config",
    ".dvc/plots",
    ".dvcignore",
    ".gitignore",
    "Makefile",
    "README.md",
    "Snakefile",
    "csrc",
    "data/inputs/.gitignore",
    "dvc.yaml",
    "examples",
    "profiles",
    "pyproject.toml",
    "results/tune/.gitignore",
    "shardlab",
    "stages",
    "user_codecs",
    "workflow",
]
"""Files of the pipeline, without params.yaml and everything that it makes."""


def copy_project(target: Path, params: str = "params/quick.yaml", **changes: object) -> Path:
    """The project without results, committed to a git repository of its own."""
    copy_parts(PARTS, ROOT, target)
    shutil.copy2(ROOT / params, target / "params.yaml")
    if changes:
        set_params(target, **changes)
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", "--all"],
        ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "copy"],
    ):
        subprocess.run(command, cwd=target, check=True)
    return target


def stage_outputs(project: Path) -> list[str]:
    """Names of files and folders that stages have written below `data` and `results`."""
    found = [*(project / "data").iterdir(), *(project / "results").glob("*")]
    return [path.name for path in found if path.name not in ("inputs", "tune")]


def copy_parts(parts: list[str], source: Path, target: Path) -> None:
    """Files and folders to the same places below `target`, with their times.

    What is compiled of them comes too: no copy takes seconds to compile the library anew.
    """
    for part in parts:
        place = target / part
        place.parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, place, dirs_exist_ok=True)
        else:
            shutil.copy2(source / part, place)


def environment(**extra: str) -> dict[str, str]:
    """`python` and the tools are those that run the tests; the library is that of the folder.

    DVC runs commands in `$SHELL`; the plainest one does the least for us (it forks for every
    command), so what holds there holds in the others.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["SHELL"] = "/bin/sh"
    return env | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"} | extra


def speaking(root: Path) -> dict[str, Any]:
    """Options of a process in `root`, whose streams are one text."""
    return {
        "cwd": root,
        "env": environment(),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def run(root: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command in `root`; what it said is shown when it fails."""
    done = subprocess.run(command, **speaking(root))
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done


def set_params(root: Path, **changes: object) -> None:
    """Changes values of params.yaml; `__` in a key stands for a dot."""
    path = root / "params.yaml"
    tree = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = tree
        for part in parents:
            node = node[part]
        node[leaf] = value
    path.write_text(yaml.safe_dump(tree, sort_keys=False))


class Marked:
    """A command in the background that can be found again with everything that it started."""

    def __init__(self, root: Path, *command: str) -> None:
        self._mark = uuid.uuid4().hex
        self._log = (root / "marked.log").open("w")
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(SHARDLAB_TEST_MARK=self._mark),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def family(self) -> dict[int, str]:
        """Process id → command line of every living process that carries the mark."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it ended meanwhile, or is somebody else's
                if process.environ().get("SHARDLAB_TEST_MARK") == self._mark:
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def close(self) -> None:
        """Ends what is left."""
        for pid in self.family():
            os.kill(pid, 9)
        self.process.wait()
        self._log.close()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
