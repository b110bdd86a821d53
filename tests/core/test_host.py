"""A record names the code that made it."""

import mmap
import subprocess
from pathlib import Path

import pytest

from shardlab.core.host import describe_host, git_revision, resident_memory


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("code.py", "README.md", "results/table.csv"):
        (tmp_path / name).write_text("one\n")
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "first")
    return tmp_path


def git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_the_revision_is_the_commit(repository: Path) -> None:
    assert git("rev-parse", "HEAD").startswith(git_revision())


def test_changed_code_is_marked_and_made_results_are_not(repository: Path) -> None:
    clean = git_revision()
    for name in ("README.md", "results/table.csv"):
        (repository / name).write_text("two\n")
    (repository / "untracked").touch()
    assert git_revision() == clean
    (repository / "code.py").write_text("two\n")
    assert git_revision() == f"{clean}+"


def test_without_git_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_revision() == "unknown"


def test_the_host_has_cores_and_memory() -> None:
    host = describe_host()
    assert host["cores"] >= 1
    assert 0 < resident_memory().highest < host["memory_bytes"]


def test_memory_that_was_given_back_stays_in_the_highest() -> None:
    before, size = resident_memory(), 200 * 2**20
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    block.close()
    after = resident_memory()
    assert after.highest >= before.now + 0.9 * size > after.now + 0.5 * size
    assert after.of_files - before.of_files < 0.1 * size
