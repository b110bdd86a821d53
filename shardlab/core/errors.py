"""Errors for the user, in one line: what is wrong, where, and the fix; errors of failed runs."""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class UserError(ValueError):
    """A mistake that the user can fix; the message is shown without a traceback."""


def without_frames(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise a `UserError` of `call` without its frames, which scripts would show for each rank."""

    @wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            raise error.with_traceback(None) from None

    return run


def warn_script(message: str) -> None:
    """Warn at the line of the user's script, above this package and torch."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardlab", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class StorageError(UserError):
    """Error of the disk: a file cannot be written, whatever its content."""


_TERMINATED = "(SIGTERM"
"""Part of the summary that `shardlab.train.launch` writes for a rank that got SIGTERM."""
_TIMED_OUT = "Timed out waiting"
"""Message of gloo if a rank neither answers nor closes its connection."""
_LOST = (_TIMED_OUT, "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo if a rank does not answer, or its process ended."""


def lost_rank(message: str) -> str | None:
    """Return gloo's message about a lost rank in the message of an error, or None."""
    return next((reason for reason in _LOST if reason in message), None)


class RunFailed(RuntimeError):
    """Error of a run that a rank or the time limit ended.

    Args:
        detail: Description with the traceback of the rank, if there is one.
        summary: Description in one line.
    """

    def __init__(
        self, kind: Literal["timeout", "crash", "memory"], detail: str, summary: str
    ) -> None:
        super().__init__(kind, detail, summary)  # pickle passes these to the constructor
        self.kind = kind
        self.detail = detail
        self.summary = summary

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    @property
    def terminated(self) -> bool:
        """Return whether a rank was ended from outside, for example by a scheduler."""
        return _TERMINATED in self.summary

    @property
    def outcome(self) -> Literal["timeout", "crash", "memory"]:
        """Kind of failure; it is a timeout if a rank hung, whichever rank noticed."""
        return "timeout" if self.hung else self.kind

    @property
    def hung(self) -> bool:
        """Return whether a rank waited for one that neither answered nor ended."""
        return _TIMED_OUT in self.summary

    @property
    def is_consequence(self) -> bool:
        """Return whether another rank is the cause: it ended, or did not answer."""
        return lost_rank(self.summary) is not None


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return a hint with the valid words closest to `word`, or with all valid words.

    The closest words are those that `word` abbreviates by initials, else those most similar to it.
    """
    valid = sorted(valid)
    close = [name for name in valid if word == "".join(part[0] for part in name.split("_"))]
    if not close:
        similar = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
        close = [name for name in similar if _likeness(word, name) == _likeness(word, similar[0])]
    words = " or ".join(repr(name) for name in sorted(close))
    return f"did you mean {words}?" if close else f"valid: {', '.join(valid)}"


def _likeness(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()


_MESSAGE = 300
"""Largest length of an error message, in characters."""


def shorten(text: str) -> str:
    """Return a message as one line of at most 300 printable characters, without its middle."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in line)
    if len(line) <= _MESSAGE:
        return line
    # the beginning says where the mistake is, the end how to fix it
    return f"{line[: _MESSAGE // 2 - 3]} ... {line[2 - _MESSAGE // 2 :]}"
