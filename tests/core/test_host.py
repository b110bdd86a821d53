"""Revision, memory and processor of the host, and who used its CPUs."""

import subprocess
from pathlib import Path

import pytest
import torch

from shardlab.core.host import (
    describe_host,
    free_memory_bytes,
    git_revision,
    gpu_names,
    resident_memory,
    torch_version,
)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("code.py", "experiments/one/results/table.csv", "results/table.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "first")
    return tmp_path


def git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_changed_code_is_marked_and_made_results_are_not(repository: Path) -> None:
    clean = git_revision()
    assert git("rev-parse", "HEAD").startswith(clean)
    for name in ("experiments/one/results/table.csv", "results/table.csv"):
        (repository / name).write_text("two\n")
    (repository / "untracked").touch()
    assert git_revision() == clean
    (repository / "code.py").write_text("two\n")
    assert git_revision() == f"{clean}+"


def test_revision_without_git_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_revision() == "unknown"


def test_the_host_has_cores_and_memory() -> None:
    host = describe_host()
    assert host["cores"] >= 1
    assert 0 < resident_memory().now <= resident_memory().highest < host["memory_bytes"]
    assert 0 < free_memory_bytes() < host["memory_bytes"]


def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    assert gpu_names(tmp_path / "absent") == []
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nBus Location: \t {bus}\n"
        (tmp_path / bus / "information").write_text(text)
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"] * 2


def test_the_version_of_torch_is_read_without_importing_it() -> None:
    assert torch_version() == torch.__version__
