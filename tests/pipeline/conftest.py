"""One finished pipeline of small size, made once and copied to whoever changes something."""

import shutil
from pathlib import Path

import pytest
from workspace import copy_project, run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from nothing by `snakemake --cores 2`; not to be changed."""
    root = copy_project(tmp_path_factory.mktemp("finished") / "project")
    run(root, "snakemake", "--cores", "2")
    return root


@pytest.fixture(scope="session")
def recorded(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished pipeline, handed over to DVC; not to be changed."""
    root = tmp_path_factory.mktemp("recorded") / "project"
    shutil.copytree(finished, root, symlinks=True)
    run(root, "dvc", "commit", "--force")
    return root


@pytest.fixture
def workspace(recorded: Path, tmp_path: Path) -> Path:
    """A finished pipeline known to both tools, to be changed."""
    root = tmp_path / "project"
    shutil.copytree(recorded, root, symlinks=True)
    return root
