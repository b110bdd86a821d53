"""Termination of processes: with their parent, and by signals (Linux)."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.1
"""Seconds until a dropped error is raised again."""


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when the thread that started it ends.

    Args:
        parent: Process id of the expected parent. If it has ended, this process ends now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def begin_child(parent: int) -> None:
    """Make this process end with its parent, and reset the signal handlers of the parent.

    Ctrl-C and hangups reach both processes; the child ignores them, and the parent handles them.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def on_end_signals(end: Callable[[int], None]) -> None:
    """Call `end` at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones.

    Signals that the process already ignores, as under nohup, stay ignored.
    """
    numbers = [n for n in _END_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]

    def once(number: int, frame: FrameType | None) -> None:
        for ignored in numbers:  # a second signal would interrupt the clean-up after the first
            signal.signal(ignored, signal.SIG_IGN)
        try:
            end(number)
        except BaseException as error:
            raise_in_handler(error)

    for number in numbers:
        signal.signal(number, once)


def raise_in_handler(error: BaseException) -> NoReturn:
    """Raise an error in a signal handler, and raise it again by SIGALRM if Python drops it.

    Python drops errors in `__del__`, in callbacks of weak references and in hooks of `os.fork`. A
    signal during a fork is handled in the first of these hooks.
    """
    report = sys.unraisablehook

    def raise_again(*_: Any) -> NoReturn:
        raise error

    def drop(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_value is not error:
            report(dropped)
            return
        signal.signal(signal.SIGALRM, raise_again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # an error raised in here would be dropped

    sys.unraisablehook = drop
    raise error


def terminate_children() -> None:
    """Send SIGTERM to every child of this process."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.terminate()
