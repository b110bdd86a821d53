"""A rank that keeps a part of a model never held the whole of it."""

import pytest
import torch

from tests.deep_models import deep_model, engine_of, highest_since_reset, reset, size_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.fresh_ranks


def grown_per_model(strategy) -> list[float]:
    """Growth of each of four ranks while it built its engine, in whole models."""

    def on_rank(group):
        model = deep_model()
        whole = size_of(model)
        reset()
        before = highest_since_reset()
        engine = engine_of(model, strategy, group)
        assert engine.residual_norm() is None
        return {"grown": torch.tensor((highest_since_reset() - before) / whole)}

    return [float(result["grown"]) for result in run_ranks(4, on_rank)]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "manual"])
def test_no_rank_holds_the_whole_model(engine):
    # a quarter of the model, and a sixteenth for the unit in work, with what the allocator keeps
    assert max(grown_per_model({"engine": engine})) < 0.9


def test_unsharded_rank_holds_the_whole_model():
    # its gradients in buckets may come to memory that the process has from before
    assert min(grown_per_model({"engine": "ddp"})) > 0.95
