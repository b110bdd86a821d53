"""Parallel build of token shards from the corpus file; a killed build resumes byte for byte."""

import os
import shutil
from concurrent.futures import as_completed
from pathlib import Path

import tokenizers

from shardlab.config.model_and_data import Tokenize
from shardlab.core.files import (
    atomic,
    sha256_of_file,
    sha256_of_value,
    write_text,
)
from shardlab.core.progress import say, track
from shardlab.data.corpus_file import read_corpus
from shardlab.data.shards import Job, Piece, build_shard, is_validation, plan_shards
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


def build_tokens(
    corpus: Path, validation_share: float, options: Tokenize, work: Path, out: Path
) -> Manifest:
    """Write `out/tokenizer.json`, the shards in `out/tokens`, and their manifest last.

    There are `options.shards` shards of training, each a run of documents with an equal part of
    the text, and one of validation. Finished ones are kept in `work/tokenize/KEY` until the
    manifest is written, where KEY stands for corpus, tokenizer and options.

    Args:
        options: those for the model, `Tokenize.for_model`.

    Raises:
        UserError: the corpus is damaged, the tokenizer unfit, or a split would be empty.
    """
    digest = sha256_of_file(corpus)
    pieces = plan_shards(corpus, validation_share, options.shards)
    tokenizer = _tokenizer(corpus, digest, validation_share, options, work)
    ranges = [piece.ranges.tolist() for piece in pieces if not piece.validation]
    identity = [_FORMAT, digest, tokenizer.sha256, tokenizer.end_of_text, validation_share, ranges]
    kept = work / "tokenize" / sha256_of_value(identity)[:16]
    job = Job(
        corpus,
        validation_share,
        kept / "tokenizer.json",
        tokenizer.end_of_text,
        "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32",
        kept,
    )
    write_text(job.tokenizer, tokenizer.to_json())
    shards = _build(job, pieces)
    manifest = Manifest(
        dtype=job.dtype,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text_id,
        end_of_text_token=tokenizer.end_of_text,
        corpus_sha256=digest,
        tokenizer_sha256=tokenizer.sha256,
        recipe_sha256=recipe_sha256(digest, validation_share, options),
        train=shards[1:],
        validation=shards[:1],
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


def _build(job: Job, pieces: list[Piece]) -> list[Shard]:
    """Build the shards of all pieces, in their order."""
    with worker_pool(min(len(pieces), usable_cores())) as pool:
        futures = [pool.submit(build_shard, job, piece) for piece in pieces]
        for future in track(as_completed(futures), "shards", len(futures), " shards"):
            future.result()
    return [future.result() for future in futures]


def _publish(job: Job, manifest: Manifest, out: Path) -> None:
    """Move everything into place, the manifest last: without one nothing looks finished."""
    tokens = out / "tokens"
    (tokens / MANIFEST).unlink(missing_ok=True)
    for stale in tokens.glob("*.bin"):
        stale.unlink()
    _link(job.tokenizer, out / "tokenizer.json")
    for shard in [*manifest.train, *manifest.validation]:
        _link(job.folder / shard.file, tokens / shard.file)
    manifest.to_file(tokens / MANIFEST)


def _link(source: Path, target: Path) -> None:
    """Hard-link the file, or copy it where the file system has no hard links."""
    with atomic(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
