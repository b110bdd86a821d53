"""Part in DVC's own locking, so that DVC waits for others and others for DVC.

DVC holds `.dvc/tmp/lock` all the time, except while the command of a stage runs; then its outputs
are in `.dvc/tmp/rwlock` with its process (dvc.lock, dvc.rwlock, dvc.stage.run). It removes the
outputs of a stage before the command runs: a lock that the command takes would come too late.
"""

import atexit
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardlab.core.errors import StorageError
from shardlab.core.files import write_text, writing
from shardlab.core.process import is_running

_FOLDER = Path(".dvc/tmp")


def enter(pid: int, command: str) -> int | None:
    """Name a process as the writer of the whole tree until it ends, or return who writes there.

    The process id returned is 0 while DVC does not say who it is.

    Raises:
        StorageError: DVC's folder cannot be written.
    """
    if not _FOLDER.parent.is_dir():
        return None
    with writing(_FOLDER):
        other = _enter(pid, command)
    if other is None:
        atexit.register(_leave, pid)
    return other


def _enter(pid: int, command: str) -> int | None:
    _FOLDER.mkdir(exist_ok=True)
    with _locked("lock") as idle:
        if not idle:
            return _holder()
        with _writers() as writers:
            if writers is None:
                return 0
            for writer in writers.values():
                if writer["pid"] != pid and is_running(writer["pid"]):
                    return int(writer["pid"])
            writers.clear()  # of those who were killed
            writers[str(Path.cwd())] = {"pid": pid, "cmd": command}
    return None


def _leave(pid: int) -> None:
    if os.getpid() != pid:  # a fork
        return
    # somebody else's moment, or no disk: DVC drops the entry of a process that has ended, too
    with suppress(StorageError), writing(_FOLDER), _writers() as writers:
        if writers is not None:
            writers.pop(str(Path.cwd()), None)


@contextmanager
def _writers() -> Iterator[dict[str, Any] | None]:
    """Yield the table of writers to be changed; None while DVC changes it."""
    with _locked("rwlock.lock") as mine:
        if not mine:
            yield None
            return
        path = _FOLDER / "rwlock"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # killed in the middle of it
            table = {}
        yield table.setdefault("write", {})
        write_text(path, json.dumps(table))  # atomically: DVC stops at one that is no JSON


@contextmanager
def _locked(name: str) -> Iterator[bool]:
    with (_FOLDER / name).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _holder() -> int:
    text = (_FOLDER / "lock").read_text().strip()
    return int(text) if text.isdecimal() else 0
