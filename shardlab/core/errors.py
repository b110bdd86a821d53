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
