"""Implementations that the benchmark of Adam compares compute the same."""

import pytest
import torch

from benchmarks import adam
from shardlab.codecs import native
from shardlab.codecs.workers import Workers

if not native.available():
    pytest.skip("no compiled kernels", allow_module_level=True)


@pytest.mark.parametrize("way", ["float32", "mixed", "sum of 2", "sum of 4"])
def test_our_step_matches_torch(way):
    vectors = adam.Vectors(4096)
    ways = adam.calls(vectors, Workers(2))
    ways[f"torch {way}"]()
    theirs = vectors.mirror.clone()
    ways[way]()
    torch.testing.assert_close(vectors.parameter, vectors.theirs.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(vectors.mirror, theirs)


def test_table_has_the_ratio_of_every_implementation():
    ways = adam.calls(adam.Vectors(256), Workers(1))
    for call in ways.values():
        call()
    table = adam._table({"0.1M, 1": {way: 1e6 * (1 + i) for i, way in enumerate(ways)}})
    assert "| float32 | 3 (3.00) 1.50x |" in table
    assert "| sum of 4 | 11 1.10x |" in table
