"""The trained model is whole on the rank that writes it, and the same on all."""

import pytest
import torch
import torch.distributed as dist

from shardlab.launch import RunFailed
from shardlab.train.outputs import gather_trained
from tests.deep_models import (
    deep_model,
    engine_of,
    highest_since_reset,
    keep_no_freed_memory,
    reset,
    size_of,
)
from tests.ranks import run_ranks

STRATEGIES = {
    "ddp": {"engine": "ddp"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-original": {"engine": "fsdp1", "use_orig_params": True},
    "fsdp2": {"engine": "fsdp2"},
    "manual": {"engine": "manual"},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_the_first_rank_holds_the_whole_model(name):
    def on_rank(group):
        keep_no_freed_memory()
        model = deep_model()
        whole, names = size_of(model), [name for name, _ in model.named_parameters()]
        engine = engine_of(model, STRATEGIES[name], group)
        reset()
        before = highest_since_reset()
        trained = gather_trained(engine, group)
        grown = (highest_since_reset() - before) / whole
        assert sorted(trained) == (sorted(names) if dist.get_rank(group) == 0 else [])
        return {"grown": torch.tensor(grown)}

    first, *others = [float(result["grown"]) for result in run_ranks(4, on_rank)]
    assert first > 0.9
    # a sixteenth for the unit in work and as much for the copies that gathering makes; 0.30 was
    # seen once, by what is not known: perhaps messages that threads of gloo had not yet let go
    assert max(others) < 0.5


def test_ranks_that_drifted_apart_are_found():
    def on_rank(group):
        engine = engine_of(deep_model(), STRATEGIES["ddp"], group)
        if dist.get_rank(group) == 1:
            engine.shards()["parameter"]["transformer.h.3.ln_1.bias"][7] += 1e-6
        gather_trained(engine, group)
        return {}

    with pytest.raises(RunFailed, match=r"different parameters.*\['transformer.h.3.ln_1.bias'\]"):
        run_ranks(2, on_rank)
