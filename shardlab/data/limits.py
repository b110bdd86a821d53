"""Limits of a document and its parts: they bound the memory of every stage that reads text."""

import re
from collections.abc import Callable, Iterable, Iterator

from shardlab.core.progress import say

LARGEST = 16 << 20
"""bytes of a record in a file, and characters of a document"""
TOO_LARGE = f"larger than {LARGEST >> 20} MiB"
PART = 1 << 18
"""characters that are tokenized at once; a tokenizer needs up to 700 bytes for each"""
WORDS = 1 << 21
"""bytes of distinct words to train a tokenizer on, which needs up to 160 bytes for each"""

# where the pre-tokenizers of byte-level BPE end a token, whatever comes before or after
_PLACE = re.compile(r"(?<=\S)[ \t\n\r]")
_TRIED = 100
# the pre-tokenizers of byte-level BPE divide these further, but join none
_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


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


def first_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts as long as the distinct words of all of them are at most `WORDS`.

    The memory and most of the time of training BPE grow with distinct words, not with text.
    """
    words: set[str] = set()
    size = characters = 0
    for text in texts:
        new = set(_WORD.findall(text)) - words
        size += sum(len(word.encode()) for word in new)
        if size > WORDS:
            say(
                f"the tokenizer is trained on the first {characters / 1e6:.3g} million characters: "
                f"those after them bring the distinct words to over {WORDS >> 20} MiB"
            )
            return
        words |= new
        characters += len(text)
        yield text
