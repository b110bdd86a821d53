"""Limits of a document and its parts: they bound the memory of every stage that reads text."""

import re
from collections.abc import Callable, Iterator

LARGEST = 16 << 20
"""bytes of a record in a file, and characters of a document"""
TOO_LARGE = f"larger than {LARGEST >> 20} MiB"
PART = 1 << 18
"""characters that are tokenized at once; a tokenizer needs up to 700 bytes for each"""

# where the pre-tokenizers of byte-level BPE end a token, whatever comes before or after
_PLACE = re.compile(r"(?<=\S)[ \t\n\r]")
_TRIED = 100


def excess(text: str) -> str | None:
    """Return the kind of a text that is beyond the limits, and none for others."""
    if len(text) > LARGEST:
        return TOO_LARGE
    last = 0
    if len(text) > PART:
        for place in _PLACE.finditer(text):
            if place.start() - last > PART:
                break
            last = place.start()
    return f"over {PART} characters without a space" if len(text) - last > PART else None


def parts(text: str, may_cut: Callable[[str, int], bool]) -> Iterator[str]:
    """Yield a text in parts of at most `PART` characters, cut before white space.

    Args:
        may_cut: whether the text can be cut before a character of this index; where it cannot
            be cut near `PART`, the rest of the text is one part.
    """
    start = 0
    while len(text) - start > PART:
        places = [m.start() for m in _PLACE.finditer(text, start + 1, start + PART + 1)]
        stop = next((p for p in places[: -_TRIED - 1 : -1] if may_cut(text, p)), None)
        if stop is None:
            break
        yield text[start:stop]
        start = stop
    yield text[start:]
