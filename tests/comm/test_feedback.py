"""Error feedback: gradients are conserved, residuals finite, skipped steps rolled back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.comm.feedback import ErrorFeedback, zeros
from shardlab.comm.optimizer_steps import on_update

KEY = MessageKey(0, 0, "unit", 0)
KINDS = ["fp32", "bf16", "int8"]


def vectors(count: int, n: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator) for _ in range(count)]


def send(
    feedback: ErrorFeedback, vector: torch.Tensor, part: str = "unit>0", spec="topk:density=0.1"
) -> torch.Tensor:
    codec = make_codec(spec)
    return codec.decode(feedback.encode(codec, vector, part, KEY), vector.numel())


def bits(feedback: ErrorFeedback) -> dict[str, bytes]:
    state = feedback.state_dict()
    return {part: stored.view(torch.uint8).numpy().tobytes() for part, stored in state.items()}


def step(model: torch.nn.Module) -> None:
    model(torch.ones(2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()


# what storage may lose in each of ten steps: half a unit in the last place of the largest value
@pytest.mark.parametrize(("kind", "tolerance"), [("fp32", 1e-5), ("bf16", 0.2), ("int8", 0.4)])
def test_sent_vectors_and_residual_sum_to_the_given_vectors(kind, tolerance):
    feedback = ErrorFeedback(kind)
    every = vectors(10)
    sent = sum(send(feedback, vector) for vector in every)
    exact = ErrorFeedback("fp32")
    exact.load_state_dict(feedback.state_dict())
    error = sent + exact.state_dict()["unit>0"] - sum(every)
    assert error.abs().max() < tolerance
    assert feedback.norm() > 1
    # of more than are squared at once, too
    large = ErrorFeedback(kind)
    stored = exact.state_dict()["unit>0"].repeat(7000)
    large.load_state_dict({"unit>0": stored})
    assert large.norm() == pytest.approx(float(stored.double().norm()), rel=tolerance)
    assert float(large.sum_of_squares()) == pytest.approx(large.norm() ** 2)


@pytest.mark.parametrize(("kind", "tolerance"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.1)])
def test_decay_is_the_part_of_an_error_that_is_remembered(kind, tolerance):
    feedback, exact, kept = ErrorFeedback(kind, decay=0.5), ErrorFeedback(), torch.zeros(300)
    for vector in vectors(3):
        kept = 0.5 * (vector + kept - send(feedback, vector))
    exact.load_state_dict(feedback.state_dict())
    assert (exact.state_dict()["unit>0"] - kept).abs().max() < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_decay_is_that_of_methods_of_several_phases_too(kind):
    feedback = ErrorFeedback(kind, decay=0.5)
    first, second = vectors(2)
    feedback.store_residual("unit*", first.clone(), torch.tensor(True))
    torch.testing.assert_close(
        feedback.corrected(second, "unit*"), second + first / 2, rtol=0, atol=0.02
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_is_all_that_is_left(kind):
    """Residuals that it lacks are zero, and a later step is rolled back to what was loaded."""
    feedback, fresh = ErrorFeedback(kind), ErrorFeedback(kind)
    first, second, third = vectors(3)
    send(feedback, first)
    feedback.end_step()
    saved = {name: tensor.clone() for name, tensor in feedback.state_dict().items()}
    send(feedback, second)
    send(feedback, second, "later>0")
    feedback.load_state_dict(saved)
    assert torch.equal(send(feedback, third, "later>0"), send(fresh, third, "later>0"))
    send(feedback, third)
    feedback.rollback()
    loaded = ErrorFeedback(kind)
    loaded.load_state_dict(saved)
    assert bits(feedback)["unit>0"] == bits(loaded)["unit>0"]
    feedback.load_state_dict({})
    assert torch.equal(send(feedback, first), send(ErrorFeedback(kind), first))


@pytest.mark.parametrize("kind", KINDS)
def test_rollback_restores_all_residuals(kind):
    feedback = ErrorFeedback(kind)
    first, second, third, fourth = vectors(4)
    send(feedback, first, "a>0")
    send(feedback, second, "b>0")
    feedback.end_step()
    before = bits(feedback)
    send(feedback, third, "b>0")
    # a second reduction of the same step, and a part that was never sent before
    send(feedback, fourth, "b>0")
    send(feedback, fourth, "new>0")
    assert bits(feedback)["b>0"] != before["b>0"]
    feedback.rollback()
    blank = zeros(kind, 300, torch.device("cpu")).view(torch.uint8).numpy().tobytes()
    assert bits(feedback) == {**before, "new>0": blank}
    feedback.rollback()
    assert bits(feedback) == {**before, "new>0": blank}


def test_updates_of_other_models_end_no_step():
    """Also when the model is gone, but what listens to it is not."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    feedback = ErrorFeedback()
    on_update(feedback.updated, model.parameters)
    first, second, third, fourth = vectors(4)
    send(feedback, first)
    step(model)
    before = bits(feedback)
    for vector in (second, third):
        send(feedback, vector)
        step(other)
    del model
    step(other)
    send(feedback, fourth)
    feedback.rollback()
    assert bits(feedback) == before


@pytest.mark.parametrize("kind", KINDS)
def test_rollback_restores_the_last_step_until_the_next_message(kind):
    """A fused optimizer is called for a step whose update it leaves out."""
    feedback = ErrorFeedback(kind)
    first, second, third = vectors(3)
    send(feedback, first)
    feedback.end_step()
    before = bits(feedback)
    send(feedback, second)
    feedback.end_step()
    feedback.rollback()
    assert bits(feedback) == before
    send(feedback, third)
    after = bits(feedback)
    feedback.end_step()
    send(feedback, second)
    feedback.rollback()
    assert bits(feedback) == after


@pytest.mark.parametrize("kind", KINDS)
def test_multi_phase_residual_is_added_and_replaced(kind):
    feedback = ErrorFeedback(kind)
    first, second = vectors(2)
    assert torch.equal(feedback.corrected(first, "unit*"), first)
    feedback.store_residual("unit*", first / 2, torch.tensor(True))
    feedback.end_step()
    given_again = feedback.corrected(second, "unit*")
    torch.testing.assert_close(given_again, second + first / 2, rtol=0, atol=0.02)
    before = bits(feedback)
    feedback.store_residual("unit*", second, torch.tensor(False))
    assert bits(feedback) == before
    feedback.store_residual("unit*", second, torch.tensor(True))
    kept = bits(feedback)
    feedback.store_residual("unit*", first, torch.tensor(False))
    assert bits(feedback) == kept != before
    feedback.rollback()
    assert bits(feedback) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@given(where=st.integers(0, 299), twice=st.booleans())
def test_residuals_stay_finite(kind, bad, where, twice):
    feedback = ErrorFeedback(kind)
    good, other = vectors(2)
    wrong = other.clone()
    wrong[where] = bad
    send(feedback, good)
    for _ in range(1 + twice):
        send(feedback, wrong, spec="int8:group=32")
        feedback.corrected(wrong, "phases*")
        feedback.store_residual("phases*", wrong, torch.tensor(True))
    loaded = ErrorFeedback("fp32")
    loaded.load_state_dict(feedback.state_dict())
    assert all(stored.isfinite().all() for stored in loaded.state_dict().values())


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_loaded_residuals_go_to_the_device_of_the_vectors(kind):
    feedback = ErrorFeedback(kind)
    feedback.load_state_dict({"unit>0": torch.ones(300)})  # of a file, on the host
    assert feedback.corrected(torch.ones(300, device="meta"), "unit>0").is_meta
