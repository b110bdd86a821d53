"""Parallel build of token shards from the corpus file; a killed build resumes byte for byte."""

import hashlib
import shutil
from array import array
from collections.abc import Iterator
from concurrent.futures import as_completed
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tokenizers

from shardlab.config.model_and_data import Tokenize
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_file, sha256_of_value, write_text
from shardlab.core.progress import say, track
from shardlab.data.corpus_file import Document, read_corpus
from shardlab.data.tokenizer import (
    TextTokenizer,
    fingerprint,
    given_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from shardlab.data.tokens import MANIFEST, Manifest, Shard
from shardlab.data.workers import usable_cores, worker_pool

_FORMAT = 1
_BATCH = 1 << 18
"""bytes of text that are encoded at once, and more where a document is longer"""


class Piece(NamedTuple):
    """Input of one shard: documents of one split in a byte range of the corpus file."""

    name: str
    validation: bool
    start: int
    """first byte of a document's line"""
    stop: int


class Job(NamedTuple):
    """Inputs common to all shards of a run."""

    corpus: Path
    validation_share: float
    tokenizer: Path
    end_of_text: str
    dtype: Literal["uint16", "uint32"]
    folder: Path


def build_tokens(
    corpus: Path, validation_share: float, options: Tokenize, work: Path, out: Path
) -> Manifest:
    """Write `out/tokenizer.json`, the shards in `out/tokens`, and their manifest last.

    There are `options.shards` shards of training, each a run of documents with an equal part of
    the text, and one of validation. Finished ones are kept in `work/tokenize/KEY` until all are
    built, where KEY stands for corpus, tokenizer and options.

    Args:
        options: those for the model, `Tokenize.for_model`.

    Raises:
        UserError: the corpus is damaged, the tokenizer unfit, or a split would be empty.
    """
    digest = sha256_of_file(corpus)
    pieces = plan_shards(corpus, validation_share, options.shards)
    tokenizer = _tokenizer(corpus, digest, validation_share, options, work)
    identity = [_FORMAT, digest, tokenizer.sha256, tokenizer.end_of_text, validation_share, pieces]
    folder = work / "tokenize" / sha256_of_value(identity)[:16]
    job = Job(
        corpus,
        validation_share,
        folder / "tokenizer.json",
        tokenizer.end_of_text,
        "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32",
        folder,
    )
    write_text(job.tokenizer, tokenizer.to_json())
    with worker_pool(min(len(pieces), usable_cores())) as pool:
        futures = [pool.submit(build_shard, job, piece) for piece in pieces]
        for future in track(as_completed(futures), "shards", len(futures), " shards"):
            future.result()
    validation, *train = [future.result() for future in futures]
    manifest = Manifest(
        dtype=job.dtype,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text_id,
        end_of_text_token=tokenizer.end_of_text,
        corpus_sha256=digest,
        tokenizer_sha256=tokenizer.sha256,
        recipe_sha256=recipe_sha256(digest, validation_share, options),
        train=train,
        validation=[validation],
    )
    _publish(job, manifest, out)
    shutil.rmtree(work / "tokenize")
    return manifest


def recipe_sha256(corpus_sha256: str, validation_share: float, options: Tokenize) -> str:
    """Return the part of the manifest of `build_tokens` that is known before building.

    Raises:
        UserError: there is no such tokenizer.
    """
    text = [corpus_sha256, validation_share]
    given = fingerprint(str(options.tokenizer)) if options.vocabulary is None else []
    tokenizer = [options.model_dump(), given, tokenizers.__version__]
    return sha256_of_value([_FORMAT, text, tokenizer])


def is_validation(key: str, share: float) -> bool:
    """Return whether the document with this `split_key` is for validation, by a hash of it alone.

    The same on every machine and in every order; documents with one title are in one split.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _tokenizer(
    corpus: Path, digest: str, share: float, options: Tokenize, work: Path
) -> TextTokenizer:
    """Return the given tokenizer, or one trained on the training split and kept for a rerun."""
    if options.vocabulary is None:
        return given_tokenizer(str(options.tokenizer), work)
    key = sha256_of_value([digest, share, options.vocabulary, tokenizers.__version__])[:16]
    path = work / "tokenize" / f"trained-{key}.json"
    if not path.is_file():
        lines = track(read_corpus(corpus), "tokenizer", unit=" documents")
        texts = (
            document.content
            for document, *_ in lines
            if not is_validation(document.split_key, share)
        )
        trained = train_tokenizer(texts, options.vocabulary)
        if trained.vocabulary < options.vocabulary:
            say(f"the text is too small for {options.vocabulary} tokens: {trained.vocabulary}")
        write_text(path, trained.to_json())
    return load_tokenizer(path)


def plan_shards(corpus: Path, validation_share: float, shards: int) -> list[Piece]:
    """Return the piece of validation, then those of training, which hold equal amounts of text.

    Each range covers the documents of the other split between, too. A range of training is empty
    where a single document outweighs several shards.

    Raises:
        UserError: one of the splits has no documents.
    """
    starts = array("q")  # lines of training documents
    before = array("q")  # bytes of training text before each
    total = validation = 0
    for document, start, _ in read_corpus(corpus):
        if is_validation(document.split_key, validation_share):
            validation += 1
        else:
            starts.append(start)
            before.append(total)
            total += document.size
    if not starts or not validation:
        split, change = ("training", "lower") if validation else ("validation", "raise")
        raise UserError(
            f"{corpus}: none of the {len(starts) + validation} documents falls into the {split} "
            f"split at data.validation_share {validation_share}; {change} it, or give more "
            "documents"
        )
    shard = np.frombuffer(before, np.int64) * shards // max(1, total)
    shard = np.minimum(shard, shards - 1)  # documents without text at the end are in the last
    first = np.searchsorted(shard, range(shards + 1))
    size = corpus.stat().st_size
    edges = np.append(np.frombuffer(starts, np.int64), size)[first].tolist()
    train = [Piece(f"train-{i}", False, *pair) for i, pair in enumerate(pairwise(edges))]
    return [Piece("validation", True, 0, size), *train]


def build_shard(job: Job, piece: Piece) -> Shard:
    """Write `NAME.bin`, then its receipt `NAME.json`; a shard with a receipt is kept.

    The bytes depend on the corpus, the tokenizer and the piece alone.
    """
    path = job.folder / f"{piece.name}.bin"
    receipt = path.with_suffix(".json")
    if path.is_file() and receipt.is_file():
        return Shard.from_file(receipt, f"remove {job.folder} and run python -m stages.tokenize")
    shard = _write(job, piece, path)
    shard.to_file(receipt)
    return shard


def _write(job: Job, piece: Piece, path: Path) -> Shard:
    tokenizer = load_tokenizer(job.tokenizer, job.end_of_text)
    dtype = np.dtype(job.dtype).newbyteorder("<")
    digest = hashlib.sha256()
    tokens = documents = size = 0
    with atomic(path) as temporary, temporary.open("wb") as file:
        for batch in _batches(job, piece):
            ids = np.array(_ids(tokenizer, batch), dtype)
            raw = ids.tobytes()
            file.write(raw)
            digest.update(raw)
            tokens += len(ids)
            documents += len(batch)
            size += sum(document.size for document in batch)
    return Shard(
        file=path.name, tokens=tokens, documents=documents, bytes=size, sha256=digest.hexdigest()
    )


def _batches(job: Job, piece: Piece) -> Iterator[list[Document]]:
    """Yield the documents of a piece, some at a time."""
    batch: list[Document] = []
    size = 0
    for document, *_ in read_corpus(job.corpus, piece.start, piece.stop):
        if is_validation(document.split_key, job.validation_share) == piece.validation:
            batch.append(document)
            size += document.size
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _ids(tokenizer: TextTokenizer, batch: list[Document]) -> list[int]:
    """Return the tokens of documents, with the end token after each."""
    end = tokenizer.end_of_text_id
    tokens: list[int] = []
    encoded = tokenizer.encode([document.content for document in batch])
    for document, ids in zip(batch, encoded, strict=True):
        if end in ids:
            raise UserError(
                f"tokenize.tokenizer: plain text of document {document.id[:40]!r} becomes the "
                f"end-of-text token {tokenizer.end_of_text!r}; give a tokenizer that keeps one "
                "token for that alone"
            )
        tokens += [*ids, end]
    return tokens


def _publish(job: Job, manifest: Manifest, out: Path) -> None:
    """Move everything into place, the manifest last: without one nothing looks finished."""
    tokens = out / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    (tokens / MANIFEST).unlink(missing_ok=True)
    for stale in tokens.glob("*.bin"):
        stale.unlink()
    write_text(out / "tokenizer.json", job.tokenizer.read_text(encoding="utf-8"))
    for shard in [*manifest.train, *manifest.validation]:
        shutil.move(job.folder / shard.file, tokens / shard.file)
    manifest.to_file(tokens / MANIFEST)
