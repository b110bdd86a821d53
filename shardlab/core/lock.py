"""One writer per working tree: Snakemake, DVC and single stages share a lock file."""

import os
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardlab.core.errors import UserError
from shardlab.core.files import writing
from shardlab.core.launch_environment import is_first_rank

_FILE, _DVC = Path(".shardlab.lock"), Path(".dvc/tmp/lock")
_HOLDER = "SHARDLAB_LOCK"
"""Environment variable with the id of the process that holds the lock; its jobs inherit it."""
_FIX = "wait until it has ended, or stop it"
_PATIENCE_S = 1.0
"""Seconds to wait for ranks of a command that was just killed."""
_locks: list[Any] = []
"""Locks that are held until this process ends, since a lock without a reference is released."""


def lock_tree(with_dvc: bool = False) -> None:
    """Lock the working directory until this process ends.

    Jobs of the process that holds the lock take no lock. Of the ranks of torchrun and srun, only
    the first takes it.

    Args:
        with_dvc: Hold also the lock of DVC, so that `dvc repro` stops before it removes outputs.
            Stages that DVC runs must not hold it: DVC takes it again when they end.

    Raises:
        UserError: Another process holds the lock, or the lock file cannot be written.
    """
    if _HOLDER in os.environ or not is_first_rank():
        return
    path = _FILE.resolve()  # in experiments/NAME it is a link, which FileLock refuses
    lock = FileLock(path)
    with writing(_FILE):
        try:
            lock.acquire(timeout=_PATIENCE_S)
        except Timeout:
            who = path.read_text().strip() or "another command"
            raise UserError(f"{who} works here: {_FIX}") from None
        command = " ".join([*(Path(word).name for word in sys.orig_argv[:2]), *sys.orig_argv[2:]])
        path.write_text(f"{command} (pid {os.getpid()} on {os.uname().nodename})\n")
    _locks.append(lock)
    if with_dvc and _DVC.parents[1].is_dir():
        _lock_dvc()
    os.environ[_HOLDER] = str(os.getpid())


def _lock_dvc() -> None:
    from dvc.lock import LockError, make_lock  # a slow import, which jobs do not need

    with writing(_DVC):
        _DVC.parent.mkdir(exist_ok=True)
        lock = make_lock(_DVC)
        try:
            lock.lock()
        except LockError:
            raise UserError(f"dvc (pid {_DVC.read_text().strip()}) works here: {_FIX}") from None
    _locks.append(lock)


def is_job() -> bool:
    """Return whether a command that holds the lock, such as Snakemake or DVC, started this one."""
    lock_is_inherited = os.environ.get(_HOLDER) not in (None, str(os.getpid()))
    return lock_is_inherited or "DVC_STAGE" in os.environ
