"""Disks for forked processes: small, full or unusual."""

import ctypes
import os
import resource
import sys
from pathlib import Path

from tests.commands import NOT_PERMITTED

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # sched.h


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def mount(kind: str, folder: Path, options: str = "") -> None:
    """Mount a new file system, which this process and those that it starts see."""
    libc = ctypes.CDLL(None)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        sys.exit(NOT_PERMITTED)
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    words = (word.encode() for word in (kind, str(folder), kind))
    if libc.mount(*words, 0, options.encode()) != 0:
        sys.exit(NOT_PERMITTED)
