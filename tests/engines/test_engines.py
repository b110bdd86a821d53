"""Engines agree with each other and with one process, reduce once per step, and resume exactly."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from whole_parameters import whole_parameters

from shardlab.core.params import Model
from shardlab.core.strategy import parse_strategy
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model

VOCABULARY, LENGTH, BATCH = 300, 16, 4
STRATEGIES = {
    "ddp": {"engine": "ddp"},
    "ddp-buckets": {"engine": "ddp", "bucket_mb": 0.1},
    "ddp-exchange": {"engine": "ddp", "gradients": {"route": "exchange"}},
    "fsdp2": {"engine": "fsdp2"},
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
    "fsdp2-every": {"engine": "fsdp2", "reduce_every_micro_batch": True},
    "fsdp2-selective": {"engine": "fsdp2", "activation_checkpointing": "selective"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-kept": {"engine": "fsdp1", "sharding": "shard_grad_op", "prefetch": 1},
    "fsdp1-replicated": {"engine": "fsdp1", "sharding": "no_shard"},
    "fsdp1-by-size": {"engine": "fsdp1", "wrap": "size", "wrap_size": 50_000},
    "fsdp1-root": {"engine": "fsdp1", "wrap": "root", "limit_all_gathers": False},
    "fsdp1-original": {"engine": "fsdp1", "use_orig_params": True, "prefetch_backward": 0},
    "fsdp1-every": {"engine": "fsdp1", "reduce_every_micro_batch": True},
    "manual": {"engine": "manual"},
    "manual-native": {"engine": "manual", "gradients": {"route": "native"}, "prefetch": 0},
    "manual-root": {"engine": "manual", "wrap": "root"},
    "manual-kept": {"engine": "manual", "reshard_after_forward": False},
    "manual-replicated": {"engine": "manual", "sharding": "no_shard"},
    "manual-two-blocks": {"engine": "manual", "wrap_size": 2},
    "manual-every": {"engine": "manual", "reduce_every_micro_batch": True},
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
HYBRID["manual-hybrid-every"] = {**HYBRID["manual-hybrid"], "reduce_every_micro_batch": True}
HYBRID["fsdp2-hybrid-every"] = {**HYBRID["fsdp2-hybrid"], "reduce_every_micro_batch": True}
STRATEGIES |= HYBRID
LOSSY = {
    "ddp-int8": {"engine": "ddp", "gradients": {"codec": "int8", "error_feedback": True}},
    "fsdp2-topk": {
        "engine": "fsdp2",
        "gradients": {"codec": "topk:density=0.1", "error_feedback": True},
    },
    "ddp-topk": {
        "engine": "ddp",
        "gradients": {"codec": "topk:density=0.1", "error_feedback": True},
    },
    "fsdp2-powersgd": {
        "engine": "fsdp2",
        "gradients": {"codec": "powersgd:rank=4", "error_feedback": True},
    },
    "ddp-powersgd": {
        "engine": "ddp",
        "gradients": {"codec": "powersgd:rank=4", "error_feedback": True},
    },
    "fsdp2-ahead-topk": {
        "engine": "fsdp2",
        "prefetch": 1,
        "gradients": {"codec": "topk:density=0.1", "error_feedback": True},
        "weights": {"codec": "int8:group=64"},
    },
    "manual-topk": {
        "engine": "manual",
        "gradients": {"codec": "topk:density=0.1", "error_feedback": True},
        "weights": {"codec": "int8:group=64"},
    },
    "slide-topk": {
        "engine": "slide",
        "param_transfer": "shard",
        "grad_sync": "gpu_reduce",
        "gradients": {"codec": "topk:density=0.1", "error_feedback": True},
        "weights": {"codec": "int8:group=64"},
    },
    "slide-int8": {
        "engine": "slide",
        "gradients": {"codec": "int8", "error_feedback": True},
    },
    "fsdp2-everything": {
        "engine": "fsdp2",
        "gradients": {
            "codec": "int8:group=64",
            "error_feedback": True,
            "residual": "int8",
            "exclude": ["*.ln_*.*"],
            "warmup_steps": 1,
        },
        "weights": {"codec": "int8:group=64"},
    },
}


def batch_of(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def make(group, strategy):
    model, weights = build_model(Model(preset="tiny"), VOCABULARY, LENGTH, 0, seed=1)
    optimization = Optimization(weight_decay=0.1, clip=0.5)
    return build_engine(model, parse_strategy(strategy), optimization, group, weights=weights)


def train(engine, group, steps, first=0, micro=1):
    rank = dist.get_rank(group)
    outcomes = [
        engine.step([batch_of(step, m, rank) for m in range(micro)], 1e-3)
        for step in range(first, first + steps)
    ]
    return torch.tensor([outcome.loss for outcome in outcomes])


@functools.cache
def losses_of(name: str, world_size: int, micro: int = 1) -> torch.Tensor:
    """Mean loss over ranks of four steps."""

    def on_rank(group):
        return {"losses": train(make(group, STRATEGIES[name]), group, 4, micro=micro)}

    results = run_ranks(world_size, on_rank)
    return torch.stack([result["losses"] for result in results]).mean(0)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in HYBRID])
def test_engines_agree_on_two_ranks(name):
    # a sum of two numbers does not depend on their order; only fused kernels may round otherwise
    torch.testing.assert_close(losses_of(name, 2), losses_of("ddp", 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "manual", "slide-full-cpu"])
def test_two_ranks_equal_two_micro_batches_of_one(name):
    def on_rank(group):
        engine = make(group, STRATEGIES[name])
        losses = [
            engine.step([batch_of(step, 0, rank) for rank in range(2)], 1e-3).loss
            for step in range(4)
        ]
        return {"losses": torch.tensor(losses)}

    alone = run_ranks(1, on_rank)[0]["losses"]
    torch.testing.assert_close(alone, losses_of(name, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2-ahead", "manual", "slide-full-cpu"])
def test_gradients_are_reduced_once_per_step(name):
    def on_rank(group):
        counts = []
        for micro in (1, 3):
            engine = make(group, STRATEGIES[name])
            engine.ledger.reset()
            train(engine, group, 2, micro=micro)
            counts.append(engine.ledger.summary()["gradients"]["collectives"])
        return {"counts": torch.tensor(counts)}

    counts = run_ranks(2, on_rank)[0]["counts"]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", HYBRID)
def test_copies_of_a_model_agree_on_four_ranks(name, micro):
    expected = losses_of("ddp", 4, micro)
    torch.testing.assert_close(losses_of(name, 4, micro), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("fsdp1", "fsdp1-replicated", "fsdp1-every", "fsdp1-original", "fsdp2", "fsdp2-ahead"),
        *("fsdp2-every", "fsdp2-overrides", "manual", "manual-every", "manual-overrides"),
        *("slide-full-cpu", "slide-shard-gpu"),
    ],
)
def test_accumulation_agrees_between_engines(name):
    expected = losses_of("ddp", 2, micro=2)
    torch.testing.assert_close(losses_of(name, 2, micro=2), expected, rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual"])
def test_compiled_blocks_compute_the_same(engine):
    strategy = {"engine": engine, "compile": True, "activation_checkpointing": "selective"}

    def on_rank(group):
        return {"losses": train(make(group, strategy), group, 4)}

    ranks = run_ranks(2, on_rank, timeout_s=300)
    losses = torch.stack([result["losses"] for result in ranks]).mean(0)
    # fused kernels round otherwise
    torch.testing.assert_close(losses, losses_of("ddp", 2), rtol=1e-5, atol=0)


def test_fsdp2_gathers_and_reduces_as_often_as_theory_says():
    def on_rank(group):
        engine = make(group, {"engine": "fsdp2"})
        train(engine, group, 1)
        summary = engine.ledger.summary()
        parameters = sum(p.numel() for p in whole_parameters(engine).values())
        gathers, reduces = summary["weights"], summary["gradients"]
        return {
            "collectives": torch.tensor([gathers["collectives"], reduces["collectives"]]),
            "raw": torch.tensor([gathers["bytes_raw"], reduces["bytes_raw"]]),
            "wire": torch.tensor([gathers["bytes_wire"], reduces["bytes_wire"]]),
            "parameters": torch.tensor(parameters),
        }

    result = run_ranks(2, on_rank)[0]
    blocks, root = 2, 1
    assert result["collectives"].tolist() == [2 * blocks + root, blocks + root]
    gathered, reduced = result["raw"].tolist()
    # half of every tensor, padded to whole rows per rank: never less than 4N/2
    assert 2 * result["parameters"] <= reduced <= 2.02 * result["parameters"]
    assert reduced < gathered < 2 * reduced
    assert result["wire"].tolist() == [gathered, 2 * reduced]


@pytest.mark.parametrize("name", LOSSY)
def test_compressed_training_moves_fewer_bytes_and_keeps_ranks_equal(name):
    def on_rank(group):
        engine = make(group, LOSSY[name])
        losses = train(engine, group, 2)
        engine.ledger.reset()
        losses = torch.cat([losses, train(engine, group, 2, first=2)])
        gradients = engine.ledger.summary()["gradients"]
        total = torch.stack([p.double().sum() for p in whole_parameters(engine).values()])
        return {
            "losses": losses,
            "ratio": torch.tensor(gradients["compression_ratio"]),
            "total": total,
        }

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["total"], second["total"])
    assert first["ratio"] > 3.5
    together = (first["losses"] + second["losses"]) / 2
    torch.testing.assert_close(together, losses_of("ddp", 2), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp-int8",
        "ddp-topk",
        "ddp-powersgd",
        "fsdp2",
        "fsdp2-topk",
        "fsdp2-powersgd",
        "fsdp2-everything",
        "fsdp2-ahead-topk",
        "manual-topk",
        "slide-full-cpu",
        "slide-topk",
    ],
)
def test_resume_continues_bit_for_bit(name):
    strategy = {**STRATEGIES, **LOSSY}[name]

    def on_rank(group):
        engine = make(group, strategy)
        train(engine, group, 3)
        saved = clone({**engine.shards(), **engine.rank_state()})
        straight = train(engine, group, 3, first=3)
        resumed = make(group, strategy)
        for kind, tensors in resumed.shards().items():
            for key, tensor in tensors.items():
                tensor.copy_(saved[kind][key])
        resumed.load_rank_state(saved)
        return {"straight": straight, "resumed": train(resumed, group, 3, first=3)}

    for result in run_ranks(2, on_rank):
        assert torch.equal(result["straight"], result["resumed"])


def clone(tree):
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "fsdp2", "ddp-int8", "fsdp2-powersgd", "fsdp2-everything", "manual-topk"),
        *("slide-full-cpu", "slide-topk", "slide-int8"),
    ],
)
def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks(name):
    def on_rank(group):
        rank = dist.get_rank(group)
        engine = make(group, {**STRATEGIES, **LOSSY}[name])
        train(engine, group, 3)
        before, residuals = whole_parameters(engine), residuals_of(engine)
        hook = engine.module.register_forward_hook(lambda *call: poison(call[-1], rank))
        outcome = engine.step([batch_of(3, 0, rank)], 1e-3)
        hook.remove()
        after, kept = whole_parameters(engine), residuals_of(engine)
        same = [torch.equal(before[key], after[key]) for key in before]
        same += [torch.equal(residuals[key], kept[key]) for key in residuals]
        again = engine.step([batch_of(4, 0, rank)], 1e-3)
        return {
            "applied": torch.tensor([outcome.applied, again.applied]),
            "same": torch.tensor(same),
        }

    for result in run_ranks(2, on_rank):
        assert result["applied"].tolist() == [False, True] and result["same"].all()


def poison(output, rank):
    """One number of rank 0 is not finite before gradients are communicated."""
    if rank == 0:
        output.logits = output.logits.clone()
        output.logits[0, 0, 0] = float("nan")
    return output


def residuals_of(engine):
    state = engine.rank_state()["communication"]
    return clone({key: value for key, value in state.items() if ".residual." in key})


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual", "slide"])
def test_evaluation_mode_reaches_the_model(engine):
    def on_rank(group):
        model = build_model(Model(preset="tiny"), VOCABULARY, LENGTH, 0, seed=1).whole()
        made = build_engine(
            model, parse_strategy({"engine": engine}), Optimization(0.1, 1.0), group
        )
        modes = []
        for mode in (False, True):
            made.module.train(mode)
            modes.append(model.lm_head.training)
        return {"modes": torch.tensor(modes)}

    assert run_ranks(1, on_rank)[0]["modes"].tolist() == [False, True]
