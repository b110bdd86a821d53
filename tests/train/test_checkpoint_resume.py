"""Resumed runs match uninterrupted ones."""

import pytest
import torch
import torch.distributed as dist

from shardlab.strategy.engine_traits import ENGINES
from tests.ranks import on_ranks, run_ranks
from tests.train.checkpointed import (
    FORMATS,
    INT4,
    Run,
    differing,
    plan_of,
    strategy_of,
)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_resumed_run_matches_uninterrupted_run(group, data, tmp_path, engine):
    """After one step and several, with and without a codec: every pair of settings."""
    straight = {}
    for codec, gradients in enumerate(({}, INT4)):
        plan = plan_of(data, strategy_of(engine, **gradients))
        straight[codec] = plan, Run.start(plan, tmp_path / "none", group).to(3)
    for number, (name, options) in enumerate(FORMATS.items()):
        turn = number + [*ENGINES].index(engine)
        step, (plan, expected) = 1 + turn // 2 % 2, straight[turn % 2]
        Run.start(plan, tmp_path / name, group, every=step, **options).to(step)
        resumed = Run.start(plan, tmp_path / name, group, **options)
        assert resumed.loop.step == step, name
        resumed.to(3)
        assert torch.equal(resumed.curve(), expected.curve()), name
        assert not differing(resumed.tensors(), expected.tensors()), name


@pytest.mark.parametrize(
    "strategy",
    [
        {"engine": "ddp", "gradients": {"codec": "powersgd:rank=4", "error_feedback": True}},
        {"engine": "ddp", "gradients": {"codec": "qsgd"}},
        {
            "engine": "fsdp2",
            "gradients": {**INT4, "residual": "int8", "exclude": ["*.ln_*.*"], "warmup_steps": 3},
            "weights": {"codec": "int8:group=64,rounding=stochastic"},
        },
        {"engine": "ddp", "sync": {"every": 3, "fragments": 2, "delay": 1, **INT4}},
        {"engine": "fsdp2", "sharding": "no_shard", "sync": {"every": 3, "momentum": 0.5}},
        {"engine": "manual", "sharding": "no_shard", "sync": {"every": 3, **INT4}},
    ],
    ids=["factors", "random", "everything", "delayed exchanges", "exchanges", "flat exchanges"],
)
@on_ranks(2)
def test_communication_state_is_resumed(group, data, tmp_path, strategy):
    plan = plan_of(data, strategy)
    straight = Run.start(plan, tmp_path, group, every=2, keep=1).to(5)
    resumed = Run.start(plan, tmp_path, group)
    assert resumed.loop.step == 4
    resumed.to(5)
    assert torch.equal(resumed.curve(), straight.curve())
    assert not differing(resumed.tensors(), straight.tensors())


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_what_dropout_drops_is_resumed(group, data, tmp_path, engine):
    """Whatever else has drawn numbers meanwhile."""
    plan = plan_of(data, strategy_of(engine), dropout=0.2)
    straight = Run.start(plan, tmp_path, group, every=2).to(4)
    torch.manual_seed(1)
    resumed = Run.start(plan, tmp_path, group, every=1000)
    assert resumed.loop.step == 4
    again = Run.start(plan, tmp_path / "none", group).to(5)
    assert torch.equal(resumed.to(5).curve(), again.curve())
    assert torch.equal(again.curve()[:4], straight.curve())
    assert not differing(resumed.tensors(), again.tensors())


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_muon_is_resumed(group, data, tmp_path, format):
    """Also where copies of the model train alone."""
    for number, sync in enumerate((None, {"every": 3})):
        plan = plan_of(data, {"engine": "ddp", "sync": sync}, optimizer="muon")
        root = tmp_path / str(number)
        straight = Run.start(plan, root, group, every=4, **FORMATS[format]).to(5)
        resumed = Run.start(plan, root, group)
        assert resumed.loop.step == 4
        assert torch.equal(resumed.to(5).curve(), straight.curve())
        assert not differing(resumed.tensors(), straight.tensors())
        held = {
            name.partition(".")[0] for name in resumed.tensors() if "h.0.mlp.c_fc.weight" in name
        }
        assert held >= {"parameter", "momentum_buffer"} and "exp_avg" not in held


@on_ranks(2)
def test_random_state_and_ledger_are_resumed(group, data, tmp_path):
    plan = plan_of(data, strategy_of("fsdp2", **INT4))
    straight = Run.start(plan, tmp_path, group, every=2)
    torch.manual_seed(7 + dist.get_rank(group))
    straight.to(4)
    expected = torch.rand(3)
    resumed = Run.start(plan, tmp_path, group)
    assert torch.equal(torch.rand(3), expected)
    assert resumed.engine.ledger.sums() == straight.engine.ledger.sums()
    assert resumed.events == straight.events
    assert resumed.loop.sample == straight.loop.sample == 4 * 12


@on_ranks(2)
def test_others_may_read_a_checkpoint_as_the_umask_lets(group, data, tmp_path):
    plan = plan_of(data, strategy_of("ddp"))
    for name, options in FORMATS.items():
        Run.start(plan, tmp_path / name, group, every=1, **options).to(1)
    new = tmp_path / f"new-{dist.get_rank(group)}"
    new.touch()
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {new.stat().st_mode}


@pytest.mark.fresh_ranks
def test_nothing_is_unpickled(data, tmp_path):
    plan = plan_of(data, strategy_of("fsdp2", **INT4))

    def on_rank(group):
        import pickle

        for name, options in FORMATS.items():
            Run.start(plan, tmp_path / name, group, every=2, **options).to(2)
        pickle.load = pickle.loads = pickle.Unpickler = torch.load = None
        for name, options in FORMATS.items():
            assert Run.start(plan, tmp_path / name, group, **options).loop.step == 2

    run_ranks(2, on_rank)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and {path.suffix for path in files} == {".json", ".safetensors"}
