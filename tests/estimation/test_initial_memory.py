"""A rank that keeps a part of a model never held the whole of it."""

import pytest
import torch

from tests.deep_models import deep_model, engine_of, highest_since_reset, reset, size_of
from tests.ranks import run_ranks


def grown_per_model(strategy) -> list[float]:
    """How far the memory of each of four ranks grew while it built its engine, in whole models."""

    def on_rank(group):
        model = deep_model()
        whole = size_of(model)
        reset()
        before = highest_since_reset()
        engine = engine_of(model, strategy, group)
        assert engine.residual_norm() is None
        return {"grown": torch.tensor((highest_since_reset() - before) / whole)}

    return [float(result["grown"]) for result in run_ranks(4, on_rank)]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "manual"])
def test_no_rank_holds_the_whole_model(engine):
    # a quarter of the model, and a sixteenth for the unit in work, with what the allocator keeps
    assert max(grown_per_model({"engine": engine})) < 0.9


def test_unsharded_rank_holds_the_whole_model():
    # the model, and its gradients in buckets
    assert min(grown_per_model({"engine": "ddp"})) > 1.3
