"""Steps of an attached model: resumed, left out, continued on another number of ranks."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.comm.feedback import ErrorFeedback
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import WRAPPERS, backward, batch, full, hsdp
from tests.ranks import on_ranks, run_ranks


@pytest.mark.parametrize(
    ("name", "residual"),
    [
        ("fsdp2", "fp32"),
        ("fsdp2", "bf16"),
        ("fsdp2", "int8"),
        ("fsdp1", "fp32"),
        ("fsdp1-zero2", "int8"),
        ("fsdp1-replicated", "fp32"),
        ("hsdp", "fp32"),
        ("ddp", "fp32"),
        ("ddp", "bf16"),
    ],
)
def test_a_run_that_is_resumed_equals_one_that_is_not(name, residual):
    def attach(model):
        return shardlab.attach(
            model,
            "topk:density=0.1",
            error_feedback=True,
            residual=residual,
            minimum_size=0,
            warmup_steps=3,
        )

    def train(model, sgd, group, steps):
        for step in steps:
            sgd.zero_grad()
            backward(model, group, step)
            sgd.step()

    def make(group):
        model = {**WRAPPERS, "hsdp": hsdp}[name](group)
        return model, attach(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def on_rank(group):
        model, handle, sgd = make(group)
        train(model, sgd, group, range(5))
        saved = handle.state_dict()
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        train(model, sgd, group, range(5, 8))
        other, fresh, sgd = make(group)
        other.load_state_dict(weights)
        fresh.load_state_dict(saved)
        train(other, sgd, group, range(5, 8))
        straight, resumed = full(model, "data"), full(other, "data")
        same = [torch.equal(straight[key], resumed[key]) for key in straight]
        state, again = handle.state_dict(), fresh.state_dict()
        same += [torch.equal(state[key], again[key]) for key in state]
        return {"same": torch.tensor(same), "norm": torch.tensor(handle.feedback.norm())}

    for result in run_ranks(2, on_rank):
        assert result["same"].all() and result["norm"] > 0


@pytest.mark.parametrize(
    ("name", "reductions"), [("fsdp2", 1), ("fsdp2", 2), ("ddp", 2), ("fsdp1", 2)]
)
def test_a_step_that_is_left_out_leaves_no_trace_on_any_rank(name, reductions):
    """A NaN on one rank; with two reductions the first of the step is still finite."""

    def on_rank(group):
        model = WRAPPERS[name](group)
        handle = shardlab.attach(model, "int8:group=32", error_feedback=True, minimum_size=0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            sgd.zero_grad()
            backward(model, group, step)
            sgd.step()
        sgd.zero_grad()
        residuals, parameters = handle.state_dict(), full(model, "data")
        for reduction in range(reductions):
            x = batch(dist.get_rank(group), reduction)
            if reduction == reductions - 1 and dist.get_rank(group) == 0:
                x[0, 0] = float("nan")
            model(x).pow(3).mean().backward()
        finite = all(grad.isfinite().all() for grad in full(model, "grad").values())
        changed = handle.state_dict()
        handle.rollback()
        after, unchanged = handle.state_dict(), full(model, "data")
        kept = [key for key in residuals if ".residual." in key]
        same = [torch.equal(residuals[key], after[key]) for key in kept]
        same += [torch.equal(parameters[key], unchanged[key]) for key in parameters]
        moved = any(not torch.equal(residuals[key], changed[key]) for key in kept)
        return {
            "finite": torch.tensor(finite),
            "same": torch.tensor(same),
            "moved": torch.tensor(moved),
        }

    results = run_ranks(2, on_rank)
    for result in results:
        assert not result["finite"] and result["same"].all()
    # the rank whose numbers were good had taken the step into its residuals
    assert results[1]["moved"]


def three_steps(name, codec):
    """The states of three ranks, and a function that attaches anew."""

    def attach(group):
        model = WRAPPERS[name](group)
        return model, shardlab.attach(model, codec, error_feedback=True, minimum_size=0)

    def on_rank(group):
        model, handle = attach(group)
        for step in range(3):
            backward(model, group, step)
        return handle.state_dict()

    return run_ranks(3, on_rank), attach


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("fsdp2", "topk:density=0.1"),
        ("fsdp2", "powersgd:rank=1"),
        ("fsdp1", "topk:density=0.1"),
        ("fsdp1-replicated", "topk:density=0.1"),
        ("ddp", "topk:density=0.1"),
    ],
)
def test_other_numbers_of_ranks_go_on_with_what_was_held_back(name, codec):
    old, attach = three_steps(name, codec)

    def on_rank(group):
        model, handle = attach(group)
        state = shardlab.merge_states(old, 2, dist.get_rank(group))
        handle.load_state_dict(state)
        norm = handle.feedback.norm()
        backward(model, group, 3)
        backward(model, group, 4)
        assert handle.state_dict().keys() >= state.keys()
        return {"norm": torch.tensor(norm)}

    assert all(result["norm"] > 0 for result in run_ranks(2, on_rank))


def test_other_numbers_of_ranks_do_not_take_states_that_were_not_merged():
    old, attach = three_steps("fsdp2", "topk:density=0.1")

    def on_rank(group):
        model, handle = attach(group)
        handle.load_state_dict(old[dist.get_rank(group)])
        with pytest.raises(UserError, match=r"on 3 ranks, the model of .* on 2 ranks"):
            backward(model, group, 3)
        return {}

    run_ranks(2, on_rank)


@on_ranks(1)
def test_residuals_without_error_feedback_are_refused(group) -> None:
    handle = shardlab.attach(WRAPPERS["fsdp2"](group), "int8")
    feedback = ErrorFeedback()
    feedback.keep("a>0", torch.ones(3))
    residuals = {f"gradients.residual.{k}": v for k, v in feedback.state_dict().items()}
    with pytest.raises(UserError, match="the state holds residuals"):
        handle.load_state_dict(residuals)
