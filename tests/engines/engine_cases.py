"""Strategies of all engines, each by its name and with a codec, and of their settings."""

import functools

import torch
import torch.distributed as dist

from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.train.outputs import check_replicas
from tests.drawn_weights import drawn_model
from tests.ranks import run_ranks

VOCABULARY, LENGTH, BATCH = 300, 16, 4
CPU = torch.device("cpu")
STRATEGIES = {
    **{engine: {"engine": engine} for engine in ENGINES},
    "ddp-buckets": {"engine": "ddp", "bucket_mb": 0.1},
    "ddp-exchange": {"engine": "ddp", "gradients": {"route": "exchange"}},
    "fsdp2-root": {"engine": "fsdp2", "wrap": "root"},
    "fsdp2-kept": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2-exchange": {"engine": "fsdp2", "gradients": {"route": "exchange"}},
    "fsdp2-ahead": {"engine": "fsdp2", "prefetch": 2, "gradients": {"route": "exchange"}},
    "fsdp2-root-ahead": {"engine": "fsdp2", "async_unshard": True, "wrap": "root"},
    "fsdp2-replicated": {"engine": "fsdp2", "sharding": "no_shard"},
    "fsdp2-two-blocks": {"engine": "fsdp2", "wrap_size": 2, "prefetch": 1},
    "fsdp2-by-size": {"engine": "fsdp2", "wrap": "size", "wrap_size": 120_000},
    "fsdp2-columns": {"engine": "fsdp2", "placement": "dim1"},
    "fsdp2-largest": {"engine": "fsdp2", "placement": "largest"},
    "fsdp2-regrouped": {"engine": "fsdp2", "reshard_after_forward": 2},
    "fsdp2-overrides": {
        "engine": "fsdp2",
        "prefetch": 1,
        "prefetch_backward": 0,
        "overrides": [
            {"layers": 1, "reshard_after_forward": False, "activation_checkpointing": "full"},
            {"module": "embedding"},
        ],
    },
    "fsdp2-selective": {"engine": "fsdp2", "activation_checkpointing": "selective"},
    "fsdp1-kept": {"engine": "fsdp1", "sharding": "shard_grad_op", "prefetch": 1},
    "fsdp1-replicated": {"engine": "fsdp1", "sharding": "no_shard"},
    "fsdp1-by-size": {"engine": "fsdp1", "wrap": "size", "wrap_size": 50_000},
    "fsdp1-root": {"engine": "fsdp1", "wrap": "root", "limit_all_gathers": False},
    "fsdp1-original": {"engine": "fsdp1", "use_orig_params": True, "prefetch_backward": 0},
    "manual-native": {"engine": "manual", "gradients": {"route": "native"}, "prefetch": 0},
    "manual-root": {"engine": "manual", "wrap": "root"},
    "manual-kept": {"engine": "manual", "reshard_after_forward": False},
    "manual-replicated": {"engine": "manual", "sharding": "no_shard"},
    "manual-two-blocks": {"engine": "manual", "wrap_size": 2},
    "manual-overrides": {
        "engine": "manual",
        "prefetch": 2,
        "prefetch_backward": 0,
        "activation_checkpointing": "full",
        "overrides": [
            {"layers": 0, "reshard_after_forward": False, "activation_checkpointing": "none"},
            {"module": "head"},
        ],
    },
}
SLIDE = {
    f"slide-{transfer}-{sync.removesuffix('_reduce')}": {
        "engine": "slide",
        "param_transfer": transfer,
        "grad_sync": sync,
    }
    for transfer in ("full", "shard")
    for sync in ("cpu_reduce", "gpu_reduce")
    if (transfer, sync) != ("full", "cpu_reduce")  # which `slide` is
}
SLIDE["slide-window"] = {"engine": "slide", "window": 3, "activation_checkpointing": "selective"}
SLIDE["slide-two-blocks"] = {"engine": "slide", "wrap_size": 2, "param_transfer": "shard"}
SLIDE["slide-exchange"] = {"engine": "slide", "gradients": {"route": "exchange"}}
STRATEGIES |= SLIDE
HYBRID = {
    f"{engine}-hybrid": {"engine": engine, "sharding": "hybrid_shard", "replicas": 2}
    for engine in ("fsdp1", "fsdp2", "manual")
}
HYBRID["fsdp2-hybrid-ahead"] = {**HYBRID["fsdp2-hybrid"], "prefetch": 1}
STRATEGIES |= HYBRID


def lossy(engine, codec, **more):
    return {"engine": engine, "gradients": {"codec": codec, "error_feedback": True}, **more}


TOPK, POWERSGD, INT8 = "topk:density=0.1", "powersgd:rank=4", {"codec": "int8:group=64"}
LOSSY = {
    **{f"{engine}-int8": lossy(engine, "int8") for engine in ENGINES},
    "ddp-topk": lossy("ddp", TOPK),
    "ddp-powersgd": lossy("ddp", POWERSGD),
    "fsdp2-topk": lossy("fsdp2", TOPK),
    "fsdp2-powersgd": lossy("fsdp2", POWERSGD),
    "fsdp2-ahead-topk": lossy("fsdp2", TOPK, prefetch=1, weights=INT8),
    "manual-topk": lossy("manual", TOPK, weights=INT8),
    "slide-topk": lossy(
        "slide", TOPK, param_transfer="shard", grad_sync="gpu_reduce", weights=INT8
    ),
    "fsdp2-everything": {
        "engine": "fsdp2",
        "gradients": {
            **INT8,
            **{"error_feedback": True, "residual": "int8"},
            **{"exclude": ["*.ln_*.*"], "warmup_steps": 1},
        },
        "weights": INT8,
    },
}


def batch_of(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def make(group, strategy, device=CPU):
    model, weights = drawn_model(Model(preset="tiny"), VOCABULARY, LENGTH, 0, 1)
    optimization = Optimization(clip=0.5)
    strategy = parse_strategy(strategy)
    return build_engine(model, strategy, optimization, group, weights=weights, device=device)


def train(engine, group, steps, first=0, micro=1):
    rank = dist.get_rank(group)
    outcomes = [
        engine.step([batch_of(step, m, rank) for m in range(micro)], 1e-3)
        for step in range(first, first + steps)
    ]
    return torch.tensor([outcome.loss for outcome in outcomes])


@functools.cache
def losses_of(name: str, world_size: int, micro: int = 1) -> torch.Tensor:
    """Mean loss over ranks of three steps, after which all replicas are equal."""

    def on_rank(group):
        engine = make(group, STRATEGIES[name])
        losses = train(engine, group, 3, micro=micro)
        check_replicas(engine, 3, group)
        return {"losses": losses}

    results = run_ranks(world_size, on_rank)
    return torch.stack([result["losses"] for result in results]).mean(0)
