"""A rank that keeps a part of a model never held the whole of it."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from shardlab.core.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.presets import Shape, shape_config
from shardlab.models.weights import RandomWeights


def highest_since_reset() -> int:
    """Bytes of resident memory at their highest since the last call of `reset`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def grown_per_model(strategy) -> list[float]:
    """How far the memory of each of four ranks grew while it built its engine, in whole models."""

    def on_rank(group):
        config = shape_config(Shape(16, 512, 8), 512, 16, 0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        whole = 4 * sum(p.numel() for p in model.parameters())
        reset()
        before = highest_since_reset()
        weights = RandomWeights(model, 0)
        optimization = Optimization(weight_decay=0.1, clip=1.0)
        engine = build_engine(model, parse_strategy(strategy), optimization, group, weights=weights)
        assert engine.residual_norm() is None
        return {"grown": torch.tensor((highest_since_reset() - before) / whole)}

    return [float(result["grown"]) for result in run_ranks(4, on_rank)]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "manual"])
def test_no_rank_holds_the_whole_model(engine):
    # a quarter of the model, and a sixteenth for the unit in work, with what the allocator keeps
    assert max(grown_per_model({"engine": engine})) < 0.75


def test_a_rank_that_shards_nothing_holds_it():
    assert min(grown_per_model({"engine": "ddp"})) > 0.95
