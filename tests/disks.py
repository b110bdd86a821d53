"""Forked processes on disks that are small, full or unusual, or with few rights."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Command

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # sched.h
_NOT_PERMITTED = 77


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def mount(kind: str, folder: Path, options: str = "") -> None:
    """Mount a new file system, which this process and those that it starts see."""
    libc = ctypes.CDLL(None)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        sys.exit(_NOT_PERMITTED)
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    words = (word.encode() for word in (kind, str(folder), kind))
    if libc.mount(*words, 0, options.encode()) != 0:
        sys.exit(_NOT_PERMITTED)


def said_on(prepare: Callable[[], object], call: Callable[[], object], folder: Path) -> str:
    """What a process says that calls the first, which makes the disk, and then the second.

    Give up rights there as well: a process that was another user for a while cannot be looked into
    afterwards (prctl(2), PR_SET_DUMPABLE), nor can those that it forks, such as ranks of other
    tests.

    Args:
        folder: an existing one, on another disk.
    """

    def both() -> None:
        prepare()
        call()

    command = Command(folder / "command", both)
    code = command.wait()
    if code == _NOT_PERMITTED:
        pytest.skip("nothing may be mounted here")
    assert code == 0, command.said()
    return command.said()
