import numpy as np
import pytest

from shardlab.data.statistics import describe_tokens
from shardlab.data.tokens import open_split
from tests.token_data import write_tokens


def test_statistics_of_tokens_counted_by_hand(tmp_path):
    # nine documents of 1, 1, 1, 1, 1, 1, 1, 9 and 4 tokens, their ends (0) included
    tokens = [0] * 7 + [1] * 8 + [0] + [2, 2, 3, 0]
    write_tokens(tmp_path, [np.array(tokens)], vocabulary=5, documents=9, size=50)
    statistics = describe_tokens(open_split(tmp_path, "train"), open_split(tmp_path, "validation"))
    assert statistics["train"] == {
        "documents": 9,
        "tokens": 20,
        "bytes": 50,
        "bytes_per_token": 2.5,
    }
    assert statistics["length"]["p50"] == 1
    assert statistics["length"]["max"] == 9
    assert statistics["length"]["mean"] == pytest.approx(20 / 9)
    assert statistics["pad_ratio"] == 0
    assert statistics["pad_ratio_if_padded"] == pytest.approx(1 - 20 / (8 * 9 + 4))
    shares = [9 / 20, 8 / 20, 2 / 20, 1 / 20]
    assert statistics["entropy_bits"] == pytest.approx(-sum(p * np.log2(p) for p in shares))
