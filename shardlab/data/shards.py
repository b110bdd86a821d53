"""Token shards: split, partition of the corpus file, and the documents of one shard as tokens."""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_file
from shardlab.data.corpus_file import read_corpus
from shardlab.data.limits import PART
from shardlab.data.tokenizer import TextTokenizer, load_tokenizer
from shardlab.data.tokens import Shard


def is_validation(key: str, share: float) -> bool:
    """Return whether the document with this `split_key` is for validation, by a hash of it alone.

    The same on every machine and in every order; documents with one title are in one split.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class Piece(NamedTuple):
    """Input of one shard."""

    name: str
    ranges: NDArray[np.int64]
    """byte ranges of the corpus file, shape (n, 2): each starts at a document's line"""
    validation: bool
    """whether it takes the documents of the validation split that are in the ranges, or the rest"""


def plan_shards(corpus: Path, validation_share: float, shards: int) -> list[Piece]:
    """Return the piece of validation, then those of training, which hold equal amounts of text.

    A training range covers the validation documents between, too. It is empty where a single
    document outweighs several shards. A validation range is one document, since these lie far
    apart: nobody reads the whole corpus again for them.

    Raises:
        UserError: one of the splits has no documents.
    """
    validation = array("q")  # starts and ends of validation documents, in turn
    starts = array("q")  # lines of training documents
    before = array("q")  # bytes of training text before each
    total = 0
    for document, start, stop in read_corpus(corpus):
        if is_validation(document.split_key, validation_share):
            validation.extend((start, stop))
        else:
            starts.append(start)
            before.append(total)
            total += document.size
    _expect_both(corpus, len(starts), len(validation) // 2, validation_share)
    shard = np.frombuffer(before, np.int64) * shards // max(1, total)
    shard = np.minimum(shard, shards - 1)  # documents without text at the end are in the last
    first = np.searchsorted(shard, range(shards + 1))
    edges = np.append(np.frombuffer(starts, np.int64), corpus.stat().st_size)[first]
    pieces = [Piece("validation", np.array(validation).reshape(-1, 2), validation=True)]
    for index, pair in enumerate(pairwise(edges)):
        pieces.append(Piece(f"train-{index}", np.array([pair]), validation=False))
    return pieces


def _expect_both(corpus: Path, train: int, validation: int, share: float) -> None:
    if not train or not validation:
        split, change = ("training", "lower") if validation else ("validation", "raise")
        raise UserError(
            f"{corpus}: none of the {train + validation} documents falls into the {split} split "
            f"at data.validation_share {share}; {change} it, or give more documents"
        )


class Job(NamedTuple):
    """Inputs common to all shards of a run."""

    corpus: Path
    validation_share: float
    tokenizer: Path
    end_of_text: str
    dtype: Literal["uint16", "uint32"]
    folder: Path


def build_shard(job: Job, piece: Piece) -> Shard:
    """Write `NAME.bin`, then its receipt `NAME.json`; a shard with a valid receipt is kept.

    The bytes depend on the corpus, the tokenizer and the piece alone.
    """
    path = job.folder / f"{piece.name}.bin"
    receipt = path.with_suffix(".json")
    shard = _kept(path, receipt)
    if shard is None:
        shard = _write(job, piece, path)
        shard.to_file(receipt)
    return shard


def _kept(path: Path, receipt: Path) -> Shard | None:
    try:
        shard = Shard.from_file(receipt, "build it again")
        return shard if sha256_of_file(path) == shard.sha256 else None
    except (OSError, UserError):  # absent or torn: build it again
        return None


def _write(job: Job, piece: Piece, path: Path) -> Shard:
    tokenizer = load_tokenizer(job.tokenizer, job.end_of_text)
    encode = tokenizer.bulk_encoder()
    dtype = np.dtype(job.dtype).newbyteorder("<")
    digest = hashlib.sha256()
    tokens = documents = size = 0
    with atomic(path) as temporary, temporary.open("wb") as file:
        for batch in _batches(job, piece, tokenizer):
            ids = np.array(_ids(tokenizer, batch, encode), dtype)
            raw = ids.tobytes()
            file.write(raw)
            digest.update(raw)
            tokens += len(ids)
            documents += sum(part.last for part in batch)
            size += sum(len(part.text.encode()) for part in batch)
    return Shard(
        file=path.name, tokens=tokens, documents=documents, bytes=size, sha256=digest.hexdigest()
    )


class _Part(NamedTuple):
    document: str
    text: str
    last: bool
    """whether the document ends with it"""


def _batches(job: Job, piece: Piece, tokenizer: TextTokenizer) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    size = 0
    lines = (read_corpus(job.corpus, start, stop) for start, stop in piece.ranges.tolist())
    for document, *_ in chain.from_iterable(lines):
        if is_validation(document.split_key, job.validation_share) == piece.validation:
            *before, last = tokenizer.parts(document.content)
            for text in [*before, last]:
                batch.append(_Part(document.id, text, text is last))
                size += len(text)
                if size >= PART:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _ids(
    tokenizer: TextTokenizer, batch: list[_Part], encode: Callable[[list[str]], list[list[int]]]
) -> list[int]:
    """Return the tokens of the parts, with the end token after each document."""
    end = tokenizer.end_of_text_id
    tokens: list[int] = []
    for part, ids in zip(batch, encode([part.text for part in batch]), strict=True):
        if end in ids:
            raise UserError(
                f"tokenize.tokenizer: plain text of document {part.document[:40]!r} becomes the "
                f"end-of-text token {tokenizer.end_of_text!r}; give a tokenizer that keeps one "
                "token for that alone"
            )
        tokens += ids
        if part.last:
            tokens.append(end)
    return tokens
