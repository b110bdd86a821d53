"""Partition of the corpus file into shards of the training split."""

from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardlab.core.errors import UserError
from shardlab.data.corpus.corpus_file import read_corpus
from shardlab.data.tokenize.split import is_validation


def plan_shards(corpus: Path, validation_share: float, shards: int) -> list[tuple[int, int]]:
    """Return byte ranges of the corpus file that hold equal amounts of training text.

    A range starts at a document's line; it covers the validation documents between, too. A shard
    is empty where a single document outweighs several shards.

    Raises:
        UserError: one of the splits has no documents.
    """
    starts = array("q")  # lines of training documents
    before = array("q")  # bytes of training text before each
    total = validation = 0
    for document, start, _ in read_corpus(corpus):
        if is_validation(document.title, validation_share):
            validation += 1
        else:
            starts.append(start)
            before.append(total)
            total += len(document.content.encode())
    _expect_both(corpus, len(starts), validation, validation_share)
    shard = np.frombuffer(before, np.int64) * shards // total
    first = np.searchsorted(shard, range(shards + 1))
    edges = np.append(np.frombuffer(starts, np.int64), corpus.stat().st_size)[first]
    return [(int(a), int(b)) for a, b in pairwise(edges)]


def _expect_both(corpus: Path, train: int, validation: int, share: float) -> None:
    if not train or not validation:
        split, change = ("training", "lower") if validation else ("validation", "raise")
        raise UserError(
            f"{corpus}: none of the {train + validation} documents falls into the {split} split "
            f"at data.validation_share {share}; {change} it, or give more documents"
        )
