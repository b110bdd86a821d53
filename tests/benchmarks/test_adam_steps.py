"""What the benchmark of Adam compares computes the same."""

import pytest
import torch

from benchmarks import adam
from shardlab.kernels import native
from shardlab.kernels.workers import Workers

if not native.available():
    pytest.skip("no compiled kernels", allow_module_level=True)


@pytest.mark.parametrize("way", ["float32", "mixed", "sum of 2", "sum of 4"])
def test_our_way_and_torchs_lead_to_the_same_parameters(way):
    vectors = adam.Vectors(4096)
    ways = adam.calls(vectors, Workers(2))
    ways[f"torch {way}"]()
    theirs = vectors.mirror.clone()
    ways[way]()
    torch.testing.assert_close(vectors.parameter, vectors.theirs.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(vectors.mirror, theirs)


def test_every_way_runs_and_has_its_ratio_in_the_table():
    ways = adam.calls(adam.Vectors(256), Workers(1))
    for call in ways.values():
        call()
    table = adam._table({"0.1M, 1": {way: 1e6 * (1 + i) for i, way in enumerate(ways)}})
    assert "| float32 | 3 (3.00) 1.50x |" in table
    assert "| sum of 4 | 11 1.10x |" in table
