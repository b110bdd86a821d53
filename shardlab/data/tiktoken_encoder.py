"""Byte-level BPE by tiktoken, for tokenizers whose ids it is sure to give."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tiktoken import Encoding
from tokenizers import Tokenizer, pre_tokenizers

# of GPT-2, as tiktoken writes it (r50k_pat_str); ByteLevel of tokenizers splits in the same places
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_PLAIN = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
}


def tiktoken_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]] | None:
    """Return a function from text to the ids that `tokenizer` gives it, several times as fast; none
    where they could differ. Special tokens in the text are text.

    tiktoken merges any two tokens that are a token together, tokenizers the listed pairs only.
    Both give the same ids if ids rise with the merges, and each merged token, taken as text, is
    encoded as that token. For let tiktoken be the first to merge an unlisted pair, to token t.
    All merges before were listed and none crossed the ends of t, so tokenizers makes the same ones
    in t alone; there it is left with that pair, and t is not encoded as t.
    """
    given = json.loads(tokenizer.to_str())
    if not (_splits_as_gpt2(given) and _is_plain(given)):
        return None
    model = given["model"]
    byte, vocabulary = _bytes_of_characters(), model["vocab"]
    merged = [first + second for first, second in model["merges"]]
    if not (byte.keys() <= vocabulary.keys() and set("".join(merged)) <= byte.keys()):
        return None
    ranks = {bytes(byte[c] for c in word): vocabulary[word] for word in [*byte, *merged]}
    rising = all(vocabulary[a] < vocabulary[b] for a, b in pairwise(merged))
    if not rising or len(set(ranks.values())) < len(ranks):
        return None
    if any([t.id for t in tokenizer.model.tokenize(w)] != [vocabulary[w]] for w in merged):
        return None
    encoding = Encoding("", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return encoding.encode_ordinary


def _splits_as_gpt2(given: dict[str, Any]) -> bool:
    """Return whether a text is split by the pattern of GPT-2, and by nothing else."""
    split = given["pre_tokenizer"] or {}
    return (
        given["normalizer"] is None
        and split.get("type") == "ByteLevel"
        and not split["add_prefix_space"]
        and split["use_regex"]
        and all(token["special"] for token in given["added_tokens"])
    )


def _is_plain(given: dict[str, Any]) -> bool:
    model = given["model"]
    return all((model.get(key) or None) == (value or None) for key, value in _PLAIN.items())


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, those from U+0100 for the other bytes in
    order (Radford et al., `bytes_to_unicode` of GPT-2's encoder.py).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {c: ord(c) for c in alphabet if ord(c) < 256}
    others = [byte for byte in range(256) if byte not in own.values()]
    return own | dict(zip(alphabet[len(own) :], others, strict=True))
