"""A finished pipeline of small size, made once and copied for tests that change it."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.report.markdown import unescape
from tests.pipeline.workspace import copy_project, run


def copied(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A copy, for this process, of what the first process of the session that asks has made."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    original = shared / f"{name}-original"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not original.exists():
            unfinished = factory.mktemp(name) / "project"
            make(unfinished)
            unfinished.rename(original)
    return copy(original, factory.mktemp(name) / "project")


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, symlinks=True))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from nothing as a reader of the README does it; not to be changed."""

    def make(root: Path) -> None:
        # an input and a method, so that every kind of stage runs
        tune = {"target_loss": 5.5, "learning_rates": [0.003], "micro_batches": {2: 1}}
        methods = {"stock": {"strategies": ["fsdp2"], "lengths": 1}}
        copy_project(root, inputs={"outside": "examples"}, tune=tune, methods=methods)
        # the environment of these tests: `make` does not install another one
        environment = root / ".venv"
        environment.symlink_to(sys.prefix)
        said = run(root, "make", "run", "--old-file=.venv/.project").stdout
        assert unescape((root / "results/report/headline.md").read_text()) in said
        environment.unlink()

    return copied(tmp_path_factory, "finished", make)


@pytest.fixture(scope="session")
def recorded(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished pipeline, handed over to DVC; not to be changed."""

    def make(root: Path) -> None:
        run(copy(finished, root), "dvc", "commit", "--force")

    return copied(tmp_path_factory, "recorded", make)


@pytest.fixture
def workspace(recorded: Path, tmp_path: Path) -> Path:
    """A finished pipeline known to both tools, to be changed."""
    return copy(recorded, tmp_path / "project")
