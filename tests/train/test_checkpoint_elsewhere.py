"""Checkpoints for another number of ranks, another mesh and another engine."""

import pytest
import torch

from shardlab.core.errors import UserError
from shardlab.strategy.engine_traits import ENGINES
from tests.ranks import on_ranks, run_ranks
from tests.train.checkpointed import Run, differing, plan_of, strategy_of

INT8 = {"codec": "int8:group=64", "error_feedback": True}


def mean_losses(results) -> torch.Tensor:
    return torch.stack([result["losses"] for result in results]).mean(0)


def losses(run: Run) -> torch.Tensor:
    return torch.tensor([event.loss for event in run.events])


@pytest.mark.parametrize(
    ("engine", "format", "gradients"),
    [
        ("slide", "sharded", INT8),
        *(
            pytest.param(engine, "sharded", INT8, marks=pytest.mark.long)
            for engine in ("ddp", "fsdp1", "fsdp2", "manual")
        ),
        # what is whole is laid out anew by every engine below
        pytest.param("fsdp2", "full", {}, marks=pytest.mark.long),
    ],
)
def test_resumption_on_fewer_ranks(data, tmp_path, engine, format, gradients):
    strategy = strategy_of(engine, **gradients)

    def straight(group):
        run = Run.start(plan_of(data, strategy, 3), tmp_path, group, every=2, format=format).to(2)
        saved, counted = run.whole(), bytes_raw(run)
        return {**saved, "counted": counted, "losses": losses(run.to(3))}

    def continued(group):
        plan = plan_of(data, strategy, 2)
        run = Run.start(plan, tmp_path, group, elastic=True, format=format)
        loaded, counted = run.whole(), bytes_raw(run)
        assert not gradients or run.engine.residual_norm() > 0
        return {**loaded, "counted": counted, "losses": losses(run.to(3))}

    before, after = run_ranks(3, straight), run_ranks(2, continued)
    saved = {key: tensor for key, tensor in before[0].items() if key != "losses"}
    assert not differing(saved, {key: after[0][key] for key in saved})
    # a codec sees other vectors on other ranks
    tolerance = 1e-3 if gradients else 1e-5
    torch.testing.assert_close(mean_losses(after), mean_losses(before), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("strategy", "format"),
    [
        ({"engine": "ddp", "sync": {"every": 2}}, "full"),
        ({"engine": "fsdp2", "sharding": "no_shard", "sync": {"every": 2}}, "sharded"),
        ({"engine": "manual", "sharding": "no_shard", "sync": {"every": 2}}, "full"),
    ],
    ids=["ddp", "fsdp2", "manual"],
)
def test_copies_continue_on_other_ranks_from_what_they_agreed_on(data, tmp_path, strategy, format):
    def straight(group):
        plan = plan_of(data, strategy)
        return Run.start(plan, tmp_path, group, every=3, format=format).to(3).whole()

    def continued(group):
        plan = plan_of(data, strategy, 1)
        run = Run.start(plan, tmp_path, group, elastic=True, format=format)
        for name, agreed in run.engine.replicas().items():
            own = run.engine.shards()["parameter"][name]
            assert torch.equal(*(getattr(t, "to_local", lambda t=t: t)() for t in (own, agreed)))
        return {**run.whole(), "losses": losses(run.to(5))}

    agreed, alone = run_ranks(2, straight)[0], run_ranks(1, continued)[0]
    assert not differing(agreed, {key: alone[key] for key in agreed})
    assert not any(tensor.any() for key, tensor in agreed.items() if key.startswith("exp_avg"))
    assert alone["losses"][-1] < alone["losses"][0]


@on_ranks(2)
def test_another_strategy_of_exchanges_begins_with_the_saved_model(group, data, tmp_path):
    saved = Run.start(plan_of(data, strategy_of("ddp")), tmp_path, group, every=2).to(2).whole()
    rare = plan_of(data, {"engine": "ddp", "sync": {"every": 9}})
    run = Run.start(rare, tmp_path, group, elastic=True).to(3)
    agreed = {name: saved[f"parameter.{name}"] for name in run.engine.replicas() if saved}
    assert not differing(agreed, {name: run.engine.replicas()[name] for name in agreed})


def bytes_raw(run: Run) -> torch.Tensor:
    return torch.tensor(run.engine.ledger.sums()["gradients"]["bytes_raw"])


MANUAL_ROOT = {"engine": "manual", "wrap": "root"}
PLACES = [*map(strategy_of, ENGINES), MANUAL_ROOT]


@pytest.mark.parametrize(
    "source",
    # every second one: all places read what these have written
    [
        pytest.param(number, marks=[pytest.mark.long] if number % 2 else [], id=name)
        for number, name in enumerate([*ENGINES, "manual-root"])
    ],
)
@on_ranks(2)
def test_a_full_checkpoint_serves_every_engine(group, data, tmp_path, source) -> None:
    straight = Run.start(plan_of(data, PLACES[source]), tmp_path, group, every=2, keep=2).to(2)
    saved = straight.whole()
    straight.to(3)
    for step in (1, 2):  # each writes for two others and reads from two
        target = PLACES[(source + step) % len(PLACES)]
        run = Run.start(plan_of(data, target), tmp_path, group, elastic=True)
        assert run.loop.step == 2
        assert not differing(run.whole(), saved)
        run.to(3)
        torch.testing.assert_close(losses(run), losses(straight), rtol=1e-6, atol=0)


@on_ranks(2)
def test_error_feedback_is_reset_for_another_strategy(group, data, tmp_path) -> None:
    Run.start(plan_of(data, strategy_of("fsdp2", **INT8)), tmp_path, group, every=2).to(2)
    for engine in ("fsdp2", "slide"):
        plan = plan_of(data, strategy_of(engine, codec="int4", error_feedback=True))
        run = Run.start(plan, tmp_path, group, elastic=True)
        assert run.engine.residual_norm() == 0, engine
        assert run.to(3).engine.residual_norm() > 0, engine


@pytest.mark.parametrize(
    ("engine", "format"),
    [
        ("manual", "full"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("fsdp1", "sharded"), ("fsdp2", "sharded"), ("manual", "sharded"))
        ),
    ],
)
@on_ranks(4)
def test_resumption_between_full_and_hybrid_sharding(group, data, tmp_path, engine, format):
    one = strategy_of(engine)
    two = {**one, "sharding": "hybrid_shard", "replicas": 2}
    straight = losses(Run.start(plan_of(data, one, 4), tmp_path / "none", group).to(3))
    run = Run.start(plan_of(data, one, 4), tmp_path, group, every=1, format=format).to(1)
    for strategy, step in ((two, 2), (one, 3)):
        saved = run.whole()
        plan = plan_of(data, strategy, 4)
        run = Run.start(plan, tmp_path, group, elastic=True, every=1, format=format)
        assert not differing(run.whole(), saved)
        run.to(step)
    torch.testing.assert_close(losses(run), straight, rtol=1e-5, atol=0)


def test_a_sharded_checkpoint_of_other_units_is_refused(data, tmp_path):
    def on_rank(group):
        Run.start(
            plan_of(data, strategy_of("fsdp2")), tmp_path, group, every=3, format="sharded"
        ).to(3)
        Run.start(plan_of(data, MANUAL_ROOT), tmp_path, group, elastic=True)

    with pytest.raises(UserError, match=r"holds no parameter 'root' of shape .*format: full$"):
        run_ranks(2, on_rank)
