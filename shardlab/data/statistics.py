"""Statistics of the tokens: document lengths, padding, entropy."""

from typing import Any

import numpy as np

from shardlab.data.tokens import TokenSplit

_PADDED_BATCH = 8
_CHUNK = 1 << 24
"""Tokens to count at once, which limits the memory for their copy of 8 bytes per token."""


def describe_tokens(
    train: TokenSplit, validation: TokenSplit, lengths: np.ndarray | None = None
) -> dict[str, Any]:
    """Return counts of both splits, and statistics of the training split.

    - `altered_documents`: documents of both splits whose tokens do not decode to their text.
    - `length`: tokens of a training document with its end token: mean, p50, p90, p99, max.
    - `pad_ratio`: fraction of padding in training, 0, since documents are packed into blocks.
    - `pad_ratio_if_padded`: fraction of padding if, instead, every 8 consecutive documents were
      padded to the longest of them.
    - `entropy_bits`: Shannon entropy of the token frequencies, in bits per token: the loss of a
      model that knows only the frequencies.

    Args:
        lengths: Tokens of each training document; None: computed from the end-of-text tokens.
    """
    if lengths is None:
        lengths = np.concatenate([_lengths(part, train.end_of_text) for part in train.arrays()])
    return {
        "vocabulary": train.vocabulary,
        "train": _size(train),
        "validation": _size(validation),
        "altered_documents": train.altered + validation.altered,
        "length": {
            "mean": float(lengths.mean()),
            "p50": float(np.percentile(lengths, 50)),
            "p90": float(np.percentile(lengths, 90)),
            "p99": float(np.percentile(lengths, 99)),
            "max": int(lengths.max()),
        },
        "pad_ratio": 0.0,
        "pad_ratio_if_padded": _pad_ratio(lengths),
        "entropy_bits": _entropy(train),
    }


def _size(split: TokenSplit) -> dict[str, Any]:
    return {
        "documents": split.documents,
        "tokens": len(split),
        "bytes": split.text_bytes,
        "bytes_per_token": None if split.text_bytes is None else split.text_bytes / len(split),
    }


def _lengths(tokens: np.ndarray, end: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == end)
    # some programs write the token before each document, not after it
    begins = len(tokens) > 0 and tokens[0] == end != tokens[-1]
    return np.diff(ends, append=len(tokens)) if begins else np.diff(ends, prepend=-1)


def _pad_ratio(lengths: np.ndarray) -> float:
    firsts = np.arange(0, len(lengths), _PADDED_BATCH)
    rows = np.diff(np.append(firsts, len(lengths)))
    padded = (np.maximum.reduceat(lengths, firsts) * rows).sum()
    return float(1 - lengths.sum() / padded)


def _entropy(split: TokenSplit) -> float:
    counts = np.zeros(split.vocabulary, np.int64)
    for part in split.arrays():
        for start in range(0, len(part), _CHUNK):
            counts += np.bincount(part[start : start + _CHUNK], minlength=split.vocabulary)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())
