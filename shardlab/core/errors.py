"""Errors for the user: what is wrong, where, and the fix, in one line; and runs that failed."""

import difflib
from collections.abc import Iterable
from typing import Literal


class UserError(ValueError):
    """A mistake that the user can fix; the message is shown without a traceback."""


class StorageError(UserError):
    """A file that cannot be written, whatever is to be in it: the disk is at fault."""


_TERMINATED = "(SIGTERM"
"""in the summary of a rank that was ended from outside, which `shardlab.train.launch` writes"""
_TIMED_OUT = "Timed out waiting"
"""gloo's message about a rank that neither answers nor closes its connection"""
_LOST = (_TIMED_OUT, "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""gloo's messages about a rank that does not answer, or whose process ended"""


def lost_rank(message: str) -> str | None:
    """Return what gloo says of another rank that is the cause of an error, if one is."""
    return next((reason for reason in _LOST if reason in message), None)


class RunFailed(RuntimeError):
    """A run that a rank or its time limit ended.

    Args:
        detail: with the traceback of the rank, if there is one.
        summary: one line.
    """

    def __init__(
        self, kind: Literal["timeout", "crash", "memory"], detail: str, summary: str
    ) -> None:
        super().__init__(kind, detail, summary)  # pickle makes it of these again
        self.kind = kind
        self.detail = detail
        self.summary = summary

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    @property
    def terminated(self) -> bool:
        """Return whether somebody ended a rank from outside, as a scheduler does."""
        return _TERMINATED in self.summary

    @property
    def outcome(self) -> Literal["timeout", "crash", "memory"]:
        """Kind of failure; a rank that hung is a timeout, whichever rank noticed it."""
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
    """Return a sentence that names the valid word closest to `word`, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"


_MESSAGE = 300
"""characters of an error message"""


def shorten(text: str) -> str:
    """Return a message as one line of at most 300 printable characters, without its middle."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in line)
    if len(line) <= _MESSAGE:
        return line
    # the beginning says where the mistake is, the end how to fix it
    return f"{line[: _MESSAGE // 2 - 3]} ... {line[2 - _MESSAGE // 2 :]}"
