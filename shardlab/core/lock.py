"""Lock of a working tree: one of Snakemake, DVC and single stages works there at a time.

The kernel holds it (flock on `.shardlab.lock`), so it ends with the processes that work, however
they end. Snakemake takes it before its first job, a stage when it starts. Who enters needs the lock
exclusively, and shares it from then on: with stages of the same Snakemake, which find its token in
their environment, and with forked ranks. So jobs that outlive their tool still keep others out.

DVC has no place to call us. A stage that it starts takes the lock in its name; before, between and
after its stages `dvc_lock` keeps others out, and DVC while others work.
"""

import fcntl
import json
import os
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from shardlab.core import dvc_lock
from shardlab.core.errors import UserError
from shardlab.core.files import writing
from shardlab.core.process import command_line, is_running, started

_FILE = Path(".shardlab.lock")
_TOKEN = "SHARDLAB_LOCK"
"""environment variable of those who work inside"""
_DVC = "SHARDLAB_DVC"
"""set by `stages.forks`"""
_PATIENCE_S = 5.0
"""for jobs whose tool was killed, which are about to end, and for DVC between two stages"""
_handle: int | None = None


class _Worker(NamedTuple):
    token: str
    pid: int
    host: str
    command: str
    since: str

    @property
    def ended(self) -> bool:
        return self.host == os.uname().nodename and not is_running(self.pid)

    def __str__(self) -> str:
        if not self.pid:
            return "another command works here: wait"
        where = "" if self.host == os.uname().nodename else f" on {self.host}"
        who = f"{self.command} (pid {self.pid}{where})"
        if self.ended:
            return f"{who} was killed, and its jobs still work here: wait, or kill them"
        return f"{who} works here since {self.since}: wait, or stop it with kill {self.pid}"


def lock_tree() -> None:
    """Take the lock of the working directory until this process and its forks have ended.

    Nothing is done by ranks of torchrun and srun other than the first, which work for that one.

    Raises:
        UserError: names who works there, or the lock cannot be written.
    """
    global _handle
    if _handle is not None or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return
    try:
        handle = os.open(_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{_FILE}: {error.strerror}: make this folder writable") from None
    deadline = time.monotonic() + _PATIENCE_S
    while (other := _enter(handle)) is not None:
        if time.monotonic() > deadline or (other.pid and not other.ended):
            os.close(handle)
            raise UserError(str(other))
        time.sleep(0.05)
    _handle = handle


def is_job() -> bool:
    """Return whether Snakemake, DVC or another command that has the lock started this one."""
    if _handle is None:  # a rank that is not the first, or no stage
        return _TOKEN in os.environ or "DVC_STAGE" in os.environ
    return _read(_handle).pid != os.getpid()


def _enter(handle: int) -> _Worker | None:
    """Share the lock as a newcomer or as a job of its owner, or return who keeps us out."""
    if not _flocked(handle, fcntl.LOCK_EX):
        owner = _read(handle)
        if owner.token and owner.token == os.environ.get(_TOKEN):
            return None if _flocked(handle, fcntl.LOCK_SH) else _nobody()
        return owner
    of_dvc = "DVC_STAGE" in os.environ
    # its commands begin with `exec`, so it is the parent, unless the stage is a fork of a server
    dvc = int(os.environ.get(_DVC, os.getppid()))
    me = _worker(dvc if of_dvc else os.getpid())
    if not of_dvc and (pid := dvc_lock.enter(me.pid, f"{me.command} since {me.since}")) is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
        return _worker(pid) if pid and is_running(pid) else _nobody()
    with writing(_FILE):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(me).encode(), 0)
    os.environ[_TOKEN] = me.token
    # not atomic: in between another newcomer may have entered
    return None if _flocked(handle, fcntl.LOCK_SH) and _read(handle) == me else _nobody()


def _flocked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(handle: int) -> _Worker:
    try:
        return _Worker(*json.loads(os.pread(handle, 1 << 16, 0)))
    except (ValueError, TypeError):  # the owner is just writing it
        return _nobody()


def _nobody() -> _Worker:
    """Return a worker of whom another look tells more."""
    return _Worker("", 0, os.uname().nodename, "", "")


def _worker(pid: int) -> _Worker:
    since = time.strftime("%F %T", time.localtime(started(pid)))
    return _Worker(uuid.uuid4().hex, pid, os.uname().nodename, command_line(pid), since)
