"""Parallel build of token shards from the corpus file; a build that was killed can be resumed."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_file, sha256_of_value, write_text
from shardlab.core.progress import say, track
from shardlab.data.corpus_file import CorpusDocument, read_corpus
from shardlab.data.settings import Tokenize
from shardlab.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    pretrained_tokenizer,
    train_tokenizer,
)
from shardlab.data.tokens import MANIFEST, Manifest, Shard
from shardlab.data.workers import usable_cores, worker_pool

_FORMAT = 2
_BATCH = 1 << 18
"""Bytes of text to encode at once, unless one document is longer."""


class CorpusPiece(NamedTuple):
    """Input of one shard: documents of one split in a byte range of the corpus file."""

    name: str
    validation: bool
    start: int
    stop: int


class TokenizeJob(NamedTuple):
    """Inputs that all shards have in common."""

    corpus: Path
    validation_share: float
    tokenizer: Path
    end_of_text: str
    dtype: Literal["uint16", "uint32"]
    folder: Path


def build_tokens(
    corpus: Path,
    validation_share: float,
    options: Tokenize,
    work: Path,
    out: Path,
    parameters: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the tokenizer to `out`, the shards to `out/tokens`, and then their manifest.

    `options.shards` training shards are built from equal parts of the corpus file, and one
    validation shard. Finished shards stay in `work/tokenize/KEY` until all are built, where KEY is
    a hash of corpus, tokenizer and options.

    Args:
        options: Options for the model, from `Tokenize.for_model`.
        parameters: Parameters of the experiment by dotted keys, for the manifest.

    Raises:
        UserError: The corpus is damaged, the tokenizer does not fit, or a split would be empty.
    """
    digest, size = sha256_of_file(corpus), corpus.stat().st_size
    tokenizer = _tokenizer(corpus, validation_share, options, work)
    edges = [size * i // options.shards for i in range(options.shards + 1)]
    train_pieces = [
        CorpusPiece(f"train-{i}", False, *ends) for i, ends in enumerate(pairwise(edges))
    ]
    pieces = [CorpusPiece("validation", True, 0, size), *train_pieces]
    identity = [_FORMAT, digest, tokenizer.sha256, tokenizer.end_of_text, validation_share, pieces]
    folder = work / "tokenize" / sha256_of_value(identity)[:16]
    job = TokenizeJob(
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
    _check_splits(job, validation.documents, sum(shard.documents for shard in train))
    manifest = Manifest(
        dtype=job.dtype,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text_id,
        end_of_text_token=tokenizer.end_of_text,
        corpus_sha256=digest,
        tokenizer_sha256=tokenizer.sha256,
        train=train,
        validation=[validation],
        parameters={**(parameters or {})},
    )
    tokenizer.save(out)
    publish(manifest, out, [folder / shard.file for shard in (*train, validation)])
    shutil.rmtree(work / "tokenize")
    return manifest


def is_validation(key: str, share: float) -> bool:
    """Return whether the document with this `split_key` is in the validation split.

    A hash of the key decides, so that the split is the same on every machine and in every order.
    Documents with the same title are in the same split.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _tokenizer(corpus: Path, share: float, options: Tokenize, work: Path) -> TextTokenizer:
    """Return the tokenizer of the options, or one trained on the training split."""
    if options.vocabulary is None:
        return pretrained_tokenizer(str(options.tokenizer), work)
    documents = track(read_corpus(corpus), "tokenizer", unit=" documents")
    texts = (doc.content for doc in documents if not is_validation(doc.split_key, share))
    trained = train_tokenizer(texts, options.vocabulary)
    if trained.vocabulary < options.vocabulary:
        say(f"the text is too small for {options.vocabulary} tokens: {trained.vocabulary}")
    return trained


def _check_splits(job: TokenizeJob, validation: int, train: int) -> None:
    if not train or not validation:
        split, change = ("training", "lower") if validation else ("validation", "raise")
        raise UserError(
            f"{job.corpus}: none of the {train + validation} documents falls into the {split} "
            f"split at data.validation_share {job.validation_share}; {change} it, or give more "
            "documents with different titles: documents with one title, or id, are in one split"
        )


def build_shard(job: TokenizeJob, piece: CorpusPiece) -> Shard:
    """Write a shard `NAME.bin`, then its receipt `NAME.json`, unless there is a receipt.

    The bytes depend only on the corpus, the tokenizer and the piece.
    """
    path = job.folder / f"{piece.name}.bin"
    receipt = path.with_suffix(".json")
    if path.is_file() and receipt.is_file():
        return Shard.from_file(receipt, f"remove {job.folder} and run shardlab tokenize")
    shard = _write(job, piece, path)
    shard.to_file(receipt)
    return shard


def _write(job: TokenizeJob, piece: CorpusPiece, path: Path) -> Shard:
    tokenizer = load_tokenizer(job.tokenizer, job.end_of_text)
    dtype = np.dtype(job.dtype).newbyteorder("<")
    digest = hashlib.sha256()
    tokens = documents = size = altered = 0
    with atomic(path) as temporary, temporary.open("wb") as file:
        for batch in encode_documents(tokenizer, _documents(job, piece)):
            raw = np.array(batch.ids, dtype).tobytes()
            file.write(raw)
            digest.update(raw)
            tokens += len(batch.ids)
            documents += batch.documents
            size += batch.bytes
            altered += batch.altered
    return Shard(
        file=path.name,
        tokens=tokens,
        documents=documents,
        bytes=size,
        altered=altered,
        sha256=digest.hexdigest(),
    )


def _documents(job: TokenizeJob, piece: CorpusPiece) -> Iterator[CorpusDocument]:
    for document in read_corpus(job.corpus, piece.start, piece.stop):
        if is_validation(document.split_key, job.validation_share) == piece.validation:
            yield document


class EncodedDocuments(NamedTuple):
    """Tokens of consecutive documents."""

    ids: list[int]
    """Token ids, with the end token after each document."""
    documents: int
    """Number of documents."""
    bytes: int
    """Bytes of their UTF-8 text, titles included."""
    altered: int
    """Documents whose tokens do not decode to their text."""


def encode_documents(
    tokenizer: TextTokenizer, documents: Iterable[CorpusDocument]
) -> Iterator[EncodedDocuments]:
    """Yield the tokens of documents in batches.

    Raises:
        UserError: Plain text becomes the end token.
    """
    batch: list[CorpusDocument] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= _BATCH:
            yield _encoded(tokenizer, batch, size)
            batch, size = [], 0
    if batch:
        yield _encoded(tokenizer, batch, size)


def _encoded(tokenizer: TextTokenizer, batch: list[CorpusDocument], size: int) -> EncodedDocuments:
    texts = [document.content for document in batch]
    encoded = tokenizer.encode(texts)
    ids = _ids(tokenizer, batch, encoded)
    return EncodedDocuments(ids, len(batch), size, tokenizer.altered(texts, encoded))


def _ids(
    tokenizer: TextTokenizer, batch: list[CorpusDocument], encoded: list[list[int]]
) -> list[int]:
    """Return the tokens of documents, with an end token after each document.

    If the tokenizer adds the end token to a text, before or after it, no second one is added.
    """
    end = tokenizer.end_of_text_id
    added_ends = tokenizer.added_ids.count(end)
    tokens: list[int] = []
    for document, ids in zip(batch, encoded, strict=True):
        if ids.count(end) > added_ends:
            raise UserError(
                f"tokenize.tokenizer: plain text of document {document.id[:40]!r} becomes the "
                f"end-of-text token {tokenizer.end_of_text!r}; give a tokenizer that encodes no "
                "text as this token"
            )
        tokens += ids if added_ends else [*ids, end]
    return tokens


def publish(manifest: Manifest, out: Path, shards: Iterable[Path] = ()) -> None:
    """Move the shards, then the manifest into `out/tokens`.

    Without a manifest the folder does not look finished.
    """
    tokens = out / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    (tokens / MANIFEST).unlink(missing_ok=True)
    for stale in tokens.glob("*.bin"):
        stale.unlink()
    for shard in shards:
        shutil.move(shard, tokens / shard.name)
    manifest.to_file(tokens / MANIFEST)
