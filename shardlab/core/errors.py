"""Errors for the user: what is wrong, where, and the fix, in one line."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can fix; the message is shown without a traceback."""


class StorageError(UserError):
    """A file that cannot be written, whatever is to be in it: the disk is at fault."""


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
