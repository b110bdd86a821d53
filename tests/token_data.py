"""Token shards: of synthetic text to train on, and of given tokens."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardlab.core.files import write_json
from shardlab.data.settings import Data, Tokenize
from shardlab.data.sources import prepare
from shardlab.data.tokenize import build_tokens
from shardlab.data.tokens import MANIFEST, Manifest, Shard


def make_token_data(folder: Path) -> Path:
    source = prepare(Data(source="synthetic", documents=120), folder / "corpus.json", folder)
    write_json(folder / "source.json", source)
    options = Tokenize(vocabulary=300, shards=1)
    build_tokens(folder / "corpus.json", 0.1, options, folder / "work", folder)
    return folder


def write_tokens(
    folder: Path, parts: Sequence[np.ndarray], vocabulary: int, documents: int = 1, size: int = 1
) -> None:
    """Write a training split with a shard for each of `parts`; the first is the validation split.

    Args:
        documents, size: number of documents and bytes of text that each shard claims.
    """
    shards = []
    for i, part in enumerate(parts):
        raw = part.astype("<u2").tobytes()
        (folder / f"train-{i}.bin").write_bytes(raw)
        digest = hashlib.sha256(raw).hexdigest()
        shards.append(
            Shard(
                file=f"train-{i}.bin",
                tokens=len(part),
                documents=documents,
                bytes=size,
                sha256=digest,
            )
        )
    Manifest(
        dtype="uint16",
        vocabulary=vocabulary,
        end_of_text=0,
        end_of_text_token="end",
        corpus_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        train=shards,
        validation=shards[:1],
    ).to_file(folder / MANIFEST)
