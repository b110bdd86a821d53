"""Steps of an attached model: resumed, rolled back, continued on another number of ranks."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardlab
from shardlab.comm.feedback import ErrorFeedback
from shardlab.core.errors import UserError
from tests.codecs.codec_examples import METHODS, SPECS
from tests.comm.wrapped_models import WRAPPERS, Crossed, backward, batch, ddp, full, hsdp
from tests.ranks import on_ranks, run_ranks

TOPK = "topk:density=0.1"
MODELS = {
    **WRAPPERS,
    "hsdp": hsdp,
    "ddp-buckets": partial(ddp, bucket_cap_mb=0.005),
    "ddp-crossed": partial(ddp, make=Crossed, bucket_cap_mb=0.005, gradient_as_bucket_view=True),
}


def attached(group, name, codec=TOPK, **options):
    model = MODELS[name](group)
    gradients = {"codec": codec, "error_feedback": True, "minimum_size": 0, **options}
    handle = shardlab.attach(model, gradients)
    return model, handle, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, sgd, group, steps):
    for step in steps:
        sgd.zero_grad()
        backward(model, group, step)
        sgd.step()


def are_equal(first, second):
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "residual"),
    [
        ("fsdp2", "int8"),
        ("fsdp1", "fp32"),
        ("fsdp1-replicated", "int8"),
        ("hsdp", "fp32"),
        ("ddp", "bf16"),
    ],
)
@on_ranks(2)
def test_resumed_run_matches_uninterrupted_run(group, name, residual):
    options = {"residual": residual, "warmup_steps": 3}
    model, handle, sgd = attached(group, name, **options)
    train(model, sgd, group, range(5))
    saved = handle.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, sgd, group, range(5, 8))
    other, fresh, sgd = attached(group, name, **options)
    other.load_state_dict(weights)
    fresh.load_state_dict(saved)
    train(other, sgd, group, range(5, 8))
    assert are_equal(full(model, "data"), full(other, "data"))
    assert are_equal(handle.state_dict(), fresh.state_dict())
    assert handle.feedback.norm() > 0


def load(folder, rank):
    """As docs/how-to/your-own-model.md says."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    own = {name: each for name, each in saved.items() if name.startswith(f"rank{rank}.")}
    state = {n: torch.empty(each.size, dtype=each.properties.dtype) for n, each in own.items()}
    dcp.load(state, checkpoint_id=folder)
    return state


def test_a_distributed_checkpoint_keeps_the_residuals_of_each_rank(tmp_path):
    def on_rank(group):
        rank = dist.get_rank(group)
        model, handle, sgd = attached(group, "fsdp2")
        train(model, sgd, group, range(3))
        expected = handle.state_dict()
        dcp.save(expected, checkpoint_id=tmp_path)
        _, fresh, _ = attached(group, "fsdp2")
        with pytest.raises(UserError, match=rf"nothing of rank {rank}: .*merge_states"):
            fresh.load_state_dict(load(tmp_path, 1 - rank))
        new = fresh.state_dict()
        dcp.load(new, checkpoint_id=tmp_path)
        with pytest.raises(UserError, match=r"holds 0 of \d+ residuals: .*metadata"):
            fresh.load_state_dict(new)
        fresh.load_state_dict(load(tmp_path, rank))
        found = fresh.state_dict()
        assert found.keys() == expected.keys() and are_equal(expected, found)
        return {k.partition(".")[2]: v for k, v in found.items()}

    first, second = run_ranks(2, on_rank)
    residuals = [key for key in first if ".residual." in key and "layout:" not in key]
    # otherwise a mixture would go unnoticed
    assert any(not torch.equal(first[key], second[key]) for key in residuals)


@pytest.mark.parametrize(
    "name", ["fsdp2", "fsdp2-columns", "hsdp", "fsdp1", "ddp-buckets", "ddp-crossed"]
)
@on_ranks(4)
def test_error_feedback_conserves_gradients(group, name):
    def gradient(model):
        return torch.cat([grad.flatten() for grad in full(model, "grad").values()])

    model, handle, _ = attached(group, name, "topk:density=0.2")
    exact, sent = MODELS[name](group), 0
    for step in range(4):
        model.zero_grad()
        backward(model, group, step)
        backward(exact, group, step)
        sent += gradient(model)
    # residuals are sent with a gradient of nearly zeros, by a codec that drops nothing; one of
    # zeros counts as none where DDP looks for unused parameters
    other, last, _ = attached(group, name, "topk:density=1.0")
    last.load_state_dict(handle.state_dict())
    (other(batch(dist.get_rank(group), 0)).sum() * 1e-30).backward()
    assert last.feedback.norm() == 0 and gradient(other).norm() > 0
    torch.testing.assert_close(sent + gradient(other), gradient(exact), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reductions", "before"),
    [("fsdp2", 1, 3), ("fsdp2", 2, 3), ("ddp", 2, 3), ("fsdp1", 2, 3), ("fsdp2", 2, 0)],
)
@on_ranks(2)
def test_rollback_restores_residuals_on_all_ranks(group, name, reductions, before):
    """A NaN on one rank; with two reductions the first of the step is still finite."""
    model, handle, sgd = attached(group, name, "int8:group=32")
    train(model, sgd, group, range(before))
    sgd.zero_grad()
    residuals, parameters = handle.feedback.state_dict(), full(model, "data")
    residuals = {name: stored.clone() for name, stored in residuals.items()}
    for reduction in range(reductions):
        x = batch(dist.get_rank(group), reduction)
        if reduction == reductions - 1 and dist.get_rank(group) == 0:
            x[0, 0] = float("nan")
        model(x).pow(3).mean().backward()
    assert not all(grad.isfinite().all() for grad in full(model, "grad").values())
    # the rank whose gradients were finite had changed its residuals
    if before and dist.get_rank(group) == 1:
        assert not are_equal(residuals, handle.feedback.state_dict())
    handle.rollback()
    if before:
        assert are_equal(residuals, handle.feedback.state_dict())
    else:
        assert handle.feedback.norm() == 0
    assert are_equal(parameters, full(model, "data"))


@on_ranks(2)
def test_an_update_inside_backward_ends_no_step(group):
    model, handle, sgd = attached(group, "fsdp2")
    train(model, sgd, group, range(2))
    before = {k: v.clone() for k, v in handle.feedback.state_dict().items()}
    (early,) = [p for name, p in model.named_parameters() if name == "2.weight"]
    inside = torch.optim.SGD([early], lr=0.1)
    early.register_post_accumulate_grad_hook(lambda _: inside.step())
    backward(model, group, 2)
    assert not are_equal(before, handle.feedback.state_dict())
    handle.rollback()
    assert are_equal(before, handle.feedback.state_dict())


WITH_RESIDUALS = {spec.partition(":")[0]: spec for spec in reversed(SPECS + METHODS)}
WITH_RESIDUALS.pop("none")
"""the first example of each codec"""


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_a_step_that_a_loss_scaler_skips_leaves_residuals_and_parameters_of_all_codecs(
    group, fused
):
    """As docs/how-to/your-own-model.md says; the overflow is on one rank alone."""
    for codec in WITH_RESIDUALS.values():
        model, handle, _ = attached(group, "ddp", codec)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            before = full(model, "data") | handle.state_dict()
            x = batch(dist.get_rank(group), step)
            if step == 1 and dist.get_rank(group) == 0:
                x[0, 0] = float("inf")
            sgd.zero_grad()
            scaler.scale(model(x).pow(3).mean()).backward()
            scale = scaler.get_scale()
            scaler.step(sgd)
            scaler.update()
            assert (scaler.get_scale() < scale) == (step == 1), codec
            if scaler.get_scale() < scale:
                handle.rollback()
                after = full(model, "data") | handle.state_dict()
                kept = {key: value for key, value in before.items() if ".group" not in key}
                assert len(kept) > len(full(model, "data")) and are_equal(kept, after), codec


@pytest.mark.parametrize(
    ("name", "codec"),
    [("fsdp2", TOPK), ("fsdp2", "powersgd:rank=1"), ("fsdp1-replicated", TOPK), ("ddp", TOPK)],
)
def test_other_numbers_of_ranks_continue_with_merged_residuals(name, codec):
    def on_three_ranks(group):
        model, handle, _ = attached(group, name, codec)
        for step in range(3):
            backward(model, group, step)
        return handle.state_dict()

    old = run_ranks(3, on_three_ranks)

    def on_rank(group):
        model, handle, _ = attached(group, name, codec)
        state = shardlab.merge_states(old, 2, dist.get_rank(group))
        handle.load_state_dict(state)
        assert handle.feedback.norm() > 0
        backward(model, group, 3)
        backward(model, group, 4)
        assert handle.state_dict().keys() >= state.keys()
        model, handle, _ = attached(group, name, codec)
        handle.load_state_dict(old[dist.get_rank(group)])
        with pytest.raises(UserError, match=r"on 3 ranks, the model of .* on 2 ranks"):
            backward(model, group, 3)

    run_ranks(2, on_rank)


@on_ranks(2)
def test_states_that_do_not_fit_are_refused(group):
    """Of other units, of other options of a method with a state, and of another shape."""
    model, handle, sgd = attached(group, "fsdp2", "powersgd:rank=1")
    train(model, sgd, group, range(2))
    saved = handle.state_dict()
    _, other, _ = attached(group, "fsdp2-columns")
    refused = (
        r"residual of '.', the model has root: wrap it as it was, or remove its keys with '(.*)'"
    )
    with pytest.raises(UserError, match=refused) as error:
        other.load_state_dict(saved)
    removed = re.search(refused, str(error.value))[1]
    assert not any("residual" in key for key in saved if removed not in key)  # nor their number
    for codec in ("powersgd:rank=2", "gradiveq", "sketch", TOPK):
        _, other, _ = attached(group, "fsdp2", codec)
        with pytest.raises(UserError, match=f"of codec powersgd:rank=1, the model has {codec[:3]}"):
            other.load_state_dict(saved)
    factors = {key: value for key, value in saved.items() if ".residual" not in key}
    factors = {key: value[:, :-1] if value.dim() > 1 else value for key, value in factors.items()}
    model, other, _ = attached(group, "fsdp2", "powersgd:rank=1")
    other.load_state_dict(factors)
    with pytest.raises(UserError, match=r"'.*weight' has \d+ columns, but the parameter has \d+"):
        backward(model, group, 2)


@on_ranks(1)
def test_residuals_without_error_feedback_are_refused(group) -> None:
    handle = shardlab.attach(WRAPPERS["fsdp2"](group), "int8")
    feedback = ErrorFeedback()
    feedback.store_residual("a>0", torch.ones(3), torch.tensor(True))
    residuals = {f"rank0.gradients.residual.{k}": v for k, v in feedback.state_dict().items()}
    with pytest.raises(UserError, match="the state holds residuals"):
        handle.load_state_dict(residuals)
