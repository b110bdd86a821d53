"""A disk that refuses the locks is one line, and DVC can read its own afterwards."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from shardlab.core import dvc_lock
from shardlab.core.errors import StorageError
from shardlab.core.lock import lock_tree


@contextmanager
def no_space():
    """Let no file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_STAGE", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    return tmp_path / ".dvc/tmp"


def test_a_full_disk_leaves_the_writers_of_dvc_as_they_were(folder):
    writers = folder / "rwlock"
    writers.write_text('{"read": {}}')
    with no_space(), pytest.raises(StorageError, match=r"\.dvc/tmp/rwlock: .*free space"):
        lock_tree()
    assert writers.read_text() == '{"read": {}}'


def test_a_full_disk_refuses_the_lock_of_the_tree(folder):
    folder.rmdir()
    folder.parent.rmdir()
    with no_space(), pytest.raises(StorageError, match=r"^\.shardlab\.lock: .*free space"):
        lock_tree()


def test_what_is_in_the_way_of_dvcs_folder_is_named(folder):
    folder.rmdir()
    folder.touch()
    with pytest.raises(StorageError, match="remove what is in its way"):
        dvc_lock.enter(os.getpid(), "a command")


def test_a_disk_that_is_full_at_the_end_fails_no_finished_command(folder):
    code = "import os, resource\nfrom shardlab.core.dvc_lock import enter\n"
    code += "assert enter(os.getpid(), 'a command') is None\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
