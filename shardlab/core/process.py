"""Processes (Linux): ends with the parent or by signals, and what the kernel knows of them."""

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when the thread that started it ends.

    Args:
        parent: process id of the expected parent; if it is already gone, this process ends now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def begin_fork(parent: int) -> None:
    """Begin a forked process that is to end with its parent, without the handlers of that: Ctrl-C
    and hangups, which reach both, are left to the parent."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def on_end_signals(end: Callable[[int], None]) -> None:
    """Call `end` at the first SIGINT, SIGTERM or SIGHUP, and ignore those that follow.

    Those that the process ignores, under nohup or in the background of a script, stay ignored.
    """
    numbers = [n for n in _END_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]

    def once(number: int, frame: FrameType | None) -> None:
        for each in numbers:  # a second one would interrupt what is put in order after the first
            signal.signal(each, signal.SIG_IGN)
        end(number)

    for number in numbers:
        signal.signal(number, once)


def terminate_children() -> None:
    """Send SIGTERM to every process that this one has started and not waited for."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if _status(pid)[1:2] == [str(os.getpid())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process; False when there is none."""
    return _status(pid)[:1] == ["T"]


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and not only its exit code."""
    return _status(pid)[:1] not in ([], ["Z"], ["X"])


def started(pid: int) -> float:
    """Return when a process was started, seconds since the epoch; 0 when there is none."""
    status = _status(pid)
    boot = Path("/proc/stat").read_text().partition("btime ")[2].partition("\n")[0]
    return int(boot) + int(status[19]) / os.sysconf("SC_CLK_TCK") if status else 0.0


def command_line(pid: int) -> str:
    """Return the command of a process in at most 100 characters, without folders and Python."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
    words = text.rstrip("\0").split("\0")
    words[:2] = [Path(word).name for word in words[:2]]
    if words[0].startswith("python") and words[1:2] not in ([], ["-m"], ["-c"]):
        words = words[1:]  # the program that it runs
    return " ".join(" ".join(words).split())[:100]


def show_command(words: Sequence[str]) -> None:
    """Show other words as the command line of this process, cut where the real ones ended."""
    text = "\0".join(["python", *words]).encode(errors="replace")
    begin, end = map(int, _status(os.getpid())[45:47])
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []
