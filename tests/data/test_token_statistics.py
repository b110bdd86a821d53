import hashlib

import numpy as np
import pytest

from shardlab.data.tokenize.statistics import describe_tokens
from shardlab.data.tokens.tokens import Manifest, Shard, open_split, write_manifest


def test_statistics_of_tokens_counted_by_hand(tmp_path):
    # nine documents of 1, 1, 1, 1, 1, 1, 1, 9 and 4 tokens, their ends (0) included
    tokens = [0] * 7 + [1] * 8 + [0] + [2, 2, 3, 0]
    raw = np.array(tokens, "<u2").tobytes()
    (tmp_path / "train-0.bin").write_bytes(raw)
    shard = Shard(
        file="train-0.bin",
        tokens=20,
        documents=9,
        bytes=50,
        sha256=hashlib.sha256(raw).hexdigest(),
    )
    manifest = Manifest(
        dtype="uint16",
        vocabulary=5,
        end_of_text=0,
        end_of_text_token="end",
        corpus_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        recipe_sha256="0" * 64,
        train=[shard],
        validation=[shard],
    )
    write_manifest(tmp_path, manifest)
    found = describe_tokens(open_split(tmp_path, "train"), open_split(tmp_path, "validation"))
    assert found["train"] == {"documents": 9, "tokens": 20, "bytes": 50, "bytes_per_token": 2.5}
    assert found["length"]["p50"] == 1
    assert found["length"]["max"] == 9
    assert found["length"]["mean"] == pytest.approx(20 / 9)
    assert found["pad_ratio"] == 0
    assert found["pad_ratio_if_padded"] == pytest.approx(1 - 20 / (8 * 9 + 4))
    shares = [9 / 20, 8 / 20, 2 / 20, 1 / 20]
    assert found["entropy_bits"] == pytest.approx(-sum(p * np.log2(p) for p in shares))
