"""Revision, memory and processor of the host."""

import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shardlab.core.host import (
    describe_host,
    free_memory_bytes,
    git_revision,
    gpu_names,
    memory_bytes,
    resident_memory,
    torch_version,
)


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


def test_revision_without_git_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_revision() == "unknown"


def test_the_host_has_cores_and_memory() -> None:
    host = describe_host()
    assert host["cores"] >= 1
    assert 0 < resident_memory().highest < host["memory_bytes"]


def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    assert gpu_names(tmp_path / "absent") == []
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nBus Location: \t {bus}\n"
        (tmp_path / bus / "information").write_text(text)
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"] * 2


def test_the_version_of_torch_is_read_without_importing_it() -> None:
    assert torch_version() == torch.__version__


def test_memory_that_was_given_back_stays_in_the_highest() -> None:
    before, size = resident_memory(), 200 * 2**20
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    block.close()
    after = resident_memory()
    assert after.highest >= before.now + 0.9 * size > after.now + 0.5 * size
    assert after.of_files - before.of_files < 0.1 * size


@pytest.fixture
def group_of_200_mb() -> Iterator[Path]:
    """A control group with that limit, inside that of this process, of either version."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    names = {controllers: name.removeprefix("/") for _, controllers, name in lines}
    found = [
        (Path("/sys/fs/cgroup/memory", names.get("memory", ""), "memory.limit_in_bytes")),
        (Path("/sys/fs/cgroup", names.get("", ""), "memory.max")),
    ]
    for path in found:
        group = path.parent / f"test-{os.getpid()}"
        try:
            group.mkdir()
            (group / path.name).write_text(str(200 << 20))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control groups can be made here")


def test_memory_is_limited_by_the_control_group(group_of_200_mb: Path) -> None:
    ours, theirs = get_context("fork").Pipe(duplex=False)

    def ask() -> None:
        (group_of_200_mb / "cgroup.procs").write_text(str(os.getpid()))
        block = mmap.mmap(-1, 100 << 20)
        before = free_memory_bytes()
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        theirs.send_bytes(f"{memory_bytes()} {before} {free_memory_bytes()}".encode())

    process = get_context("fork").Process(target=ask)
    process.start()
    limit, before, after = map(int, ours.recv_bytes().split())
    process.join()
    assert limit == 200 << 20
    assert 100 << 20 < before <= 200 << 20
    assert 80 << 20 < before - after < 120 << 20


def test_free_memory_is_less_than_all() -> None:
    assert 0 < free_memory_bytes() < describe_host()["memory_bytes"]
