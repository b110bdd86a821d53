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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardlab.core.process import is_running

_FOLDER = Path(".dvc/tmp")


def enter(pid: int, command: str) -> int | None:
    """Name a process as the writer of the whole tree until it ends, or return who writes there.

    The process id returned is 0 while DVC does not say who it is.
    """
    if not _FOLDER.parent.is_dir():
        return None
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
    atexit.register(_leave, pid)
    return None


def _leave(pid: int) -> None:
    if os.getpid() != pid:  # a fork
        return
    with _writers() as writers:
        # somebody else's moment: DVC drops the entry of a process that has ended, too
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
        path.write_text(json.dumps(table), encoding="utf-8")


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
