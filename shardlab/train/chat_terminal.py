"""Prompt line of a conversation."""

import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress

from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.train.conversation import Conversation

_SHOWN = "\n\t\u200c\u200d"
"""of the characters below: those of text, and joiners, which scripts and emoji need"""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""controls, formats such as the direction of text, half surrogates, separators"""


def printable(text: str) -> str:
    """Return a model's text with everything escaped that could control or crash a terminal."""
    shown = "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in _HIDDEN and char not in _SHOWN
        else char
        for char in text
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def show(answer: Iterable[str]) -> None:
    """Print the pieces of an answer as they come, and end the line."""
    try:
        for piece in answer:
            print(printable(piece), end="", flush=True)
    finally:
        print(flush=True)


def converse(conversation: Conversation) -> None:
    """Answer each line of stdin until it ends.

    An answer that fails is one line. Ctrl-C ends an answer, or at the prompt the conversation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - editing and earlier lines at the prompt
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except (EOFError, KeyboardInterrupt):
            if mark:
                print()
            return
        # a byte that is no text would be half a surrogate
        text = line.encode("utf-8", "replace").decode()
        if text.strip():
            try:
                show(conversation.answer(text))
            except KeyboardInterrupt:
                continue
            except UserError as error:
                say(f"chat: error: {error}")
