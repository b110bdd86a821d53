"""Unfinished files of killed processes go, those of living ones stay."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from shardlab.core.files import atomic, write_text
from shardlab.core.unfinished import temporary, unfinished

WRITER = """
import sys, time
from shardlab.core.files import atomic
with atomic(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def test_files_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    process = writer(tmp_path / "corpus.json")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".corpus.json.")
    write_text(tmp_path / "corpus.json", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]


def test_files_of_a_living_process_and_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / ".corpus.json.backup-of-mine").mkdir()
    process = writer(tmp_path / "corpus.json")
    write_text(tmp_path / "corpus.json", "whole")
    assert len(list(tmp_path.glob(".corpus.json.*/corpus.json"))) == 1
    process.kill()
    process.communicate()
    with atomic(tmp_path / "corpus.json") as temporary:
        temporary.write_text("again")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".corpus.json.backup-of-mine",
        "corpus.json",
    ]


def test_a_forked_process_holds_the_folder_too(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with unfinished(target) as folder:
        (folder / "part").touch()
        child = os.fork()
        if child == 0:
            signal.pause()
        with unfinished(target) as other:
            assert folder.exists() and other != folder
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_in_tmpdir_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / ".shardlab-trace.abcd1234"
    left.mkdir()
    with temporary("shardlab-trace") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
