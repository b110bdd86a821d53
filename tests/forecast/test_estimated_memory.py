"""Memory estimated before a run: traced, in closed form, and measured on real ranks agree."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import parse_strategy
from shardlab.forecast.traced_memory import imagined_ranks, traced_memory
from shardlab.models.build import build_model
from shardlab.models.memory_step import closed_form
from shardlab.models.unit_sizes import sizes_of
from shardlab.train.utilization import MemoryMeter
from tests.deep_models import deep_model, engine_of, keep_no_freed_memory
from tests.ranks import run_ranks

pytestmark = pytest.mark.fresh_ranks

CPU = torch.device("cpu")

STRATEGIES = {
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-kept": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2-root": {"engine": "fsdp2", "wrap": "root"},
    "fsdp2-full": {"engine": "fsdp2", "activation_checkpointing": "full"},
    "fsdp2-selective": {"engine": "fsdp2", "activation_checkpointing": "selective"},
    "fsdp2-bf16": {"engine": "fsdp2", "param_dtype": "bf16"},
    "fsdp2-hybrid": {"engine": "fsdp2", "sharding": "hybrid_shard", "replicas": 2},
    "fsdp2-replicated": {"engine": "fsdp2", "sharding": "no_shard"},
    "fsdp2-every": {"engine": "fsdp2", "reduce_every_micro_batch": True},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-hybrid": {"engine": "fsdp1", "sharding": "hybrid_shard", "replicas": 2},
    "fsdp1-replicated": {"engine": "fsdp1", "sharding": "no_shard"},
    "ddp": {"engine": "ddp"},
    "ddp-bf16": {"engine": "ddp", "param_dtype": "bf16"},
}
OFTEN = "fsdp2-full", "fsdp1-hybrid", "ddp"
"""those that the fast tests trace"""
PLAIN = "fsdp2", "fsdp2-root", "fsdp2-bf16", "fsdp1"
"""others that are traced with one micro-batch"""
UNTRACED = [
    {"engine": "manual"},
    {"engine": "fsdp1", "use_orig_params": True},
    {"engine": "ddp", "activation_checkpointing": "full", "activations": "disk"},
    {"engine": "fsdp2", "offload": True},
]


def estimates(accumulation, strategies):
    """Pairs of what is traced and what the closed form says, in the order of the strategies.

    In a process of their own: its process group is fake, and other tests fork real ranks.
    """
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(estimates_here, accumulation, strategies).result(200)


def estimates_here(accumulation, strategies):
    train = Train(batch_size=4, sequence_length=32, accumulation=accumulation)
    model = build_model(Model(preset="10m"), 512, 32, 0, seed=0).module
    found = []
    with imagined_ranks(4) as group:
        for strategy in map(parse_strategy, strategies):
            formula = closed_form(strategy, sizes_of(model, strategy, train, CPU), 4)
            found.append((traced_memory(model.config, strategy, train, group), formula))
    return found


@pytest.fixture(scope="module")
def of_one_micro_batch():
    """Estimates of the strategies that are traced, by name, and of the others."""
    traced = {name: STRATEGIES[name] for name in OFTEN}
    found = estimates(1, [*traced.values(), *UNTRACED])
    return dict(zip(traced, found, strict=False)), found[len(traced) :]


def agree(found):
    ratios = {
        name: round(sum(formula.values()) / sum(traced.values()), 3)
        for name, (traced, formula) in found.items()
    }
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios


def test_closed_form_matches_the_traced_memory(of_one_micro_batch):
    agree(of_one_micro_batch[0])


@pytest.mark.long
@pytest.mark.parametrize(("accumulation", "names"), [(1, PLAIN), (2, [*STRATEGIES])])
def test_closed_form_matches_the_traced_memory_of_others(accumulation, names):
    found = estimates(accumulation, [STRATEGIES[name] for name in names])
    agree(dict(zip(names, found, strict=True)))


def test_untraceable_strategies_have_a_closed_form_only(of_one_micro_batch):
    found = of_one_micro_batch[1]
    assert len(found) == len(UNTRACED)
    assert all(traced is None and formula for traced, formula in found)
    _, offloaded = found[-1]
    assert not {"parameters", "gradients", "moments"} & offloaded.keys()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual"])
def test_memory_growth_of_a_rank_matches_the_closed_form(engine):
    train, strategy = Train(batch_size=2, sequence_length=16), {"engine": engine}

    def on_rank(group):
        keep_no_freed_memory()
        meter = MemoryMeter(CPU)
        model = deep_model()
        sizes = sizes_of(model, parse_strategy(strategy), train, CPU)
        formula = closed_form(parse_strategy(strategy), sizes, 2)
        trained = engine_of(model, strategy, group)
        for _ in range(2):
            trained.step([torch.randint(512, (2, 17))], 1e-3)
        grown = meter.used().memory_growth_bytes
        return {"ratio": torch.tensor(grown / sum(formula.values()))}

    # threads, buffers of gloo and what else a process needs take some 20 MB of 300
    results = run_ranks(2, on_rank, clean_heap=True)
    assert all(0.85 < float(result["ratio"]) < 1.25 for result in results)
