"""Implementations that the benchmark of Adam compares compute the same."""

import pytest
import torch

from benchmarks import adam
from shardlab.kernels import native
from shardlab.kernels.workers import Workers

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


def test_cells_have_the_ratio_to_torch():
    rates = {"torch float32": 2e6, "float32": 4e6}
    assert adam.cell("float32", rates) == "4.00 2.00x"
    assert adam.cell("torch float32", rates) == "2.00"
