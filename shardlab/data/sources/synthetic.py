"""Synthetic text for quick experiments: Zipf frequencies and learnable successors."""

import random
from collections.abc import Iterator
from itertools import accumulate

from shardlab.data.corpus.document import Document

_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_WORDS = 1000
_SUCCESSORS = 8
_FOLLOWS = 0.8
"""fraction of words drawn from the successors of the previous word"""


def generate(documents: int, seed: int = 0) -> Iterator[Document]:
    """Yield documents of 5 to 40 sentences over 1000 words.

    A word's frequency falls as one over its rank (Zipf); four words in five are one of eight
    successors of the word before, so a model that learns the pairs beats the frequencies alone.
    """
    draw = random.Random(seed)
    words = _invent(draw)
    ranks = range(_WORDS)
    zipf = list(accumulate(1 / (rank + 1) for rank in ranks))
    successors = [draw.choices(ranks, cum_weights=zipf, k=_SUCCESSORS) for _ in ranks]

    def sentence() -> str:
        chosen = draw.choices(ranks, cum_weights=zipf)
        for _ in range(draw.randrange(4, 15)):
            if draw.random() < _FOLLOWS:
                chosen.append(draw.choice(successors[chosen[-1]]))
            else:
                chosen += draw.choices(ranks, cum_weights=zipf)
        return " ".join(words[rank] for rank in chosen).capitalize() + "."

    for number in range(1, documents + 1):
        title = f"{draw.choice(words)} {draw.choice(words)} {number}".capitalize()
        text = " ".join(sentence() for _ in range(draw.randrange(5, 41)))
        yield Document(str(number), title, text)


def _invent(draw: random.Random) -> list[str]:
    words: dict[str, None] = {}  # a set would lose the order
    while len(words) < _WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randrange(1, 5)))] = None
    return list(words)
