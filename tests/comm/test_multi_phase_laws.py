"""The laws of `shardlab.codecs.multi_phase.MultiPhaseMethod` on real ranks, for every method."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_method
from shardlab.comm.codec_collective import Route
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from tests.codecs.codec_examples import METHODS
from tests.comm.phase_vectors import LAYOUTS, UNIT, Call, gradients, joined
from tests.comm.wire import gathered, is_same_everywhere
from tests.ranks import on_ranks

every_method = pytest.mark.parametrize("spec", METHODS)
both_ways = pytest.mark.parametrize("how", list(LAYOUTS))
STEPS = 4
ONE_OF_EACH = {spec.partition(":")[0]: spec for spec in METHODS}.values()


def check_sum(result, sent, group, how):
    """The result is the sum of what the ranks sent, and not zero."""
    total = joined(result, group, how)
    torch.testing.assert_close(total, sum(gathered(sent, group)), rtol=1e-4, atol=1e-4)
    assert total.any()


# the laws below have two ranks; one and four are for a setting of each method
@pytest.mark.parametrize(
    ("world_size", "spec"),
    [(3, spec) for spec in METHODS] + [(n, spec) for n in (1, 4) for spec in ONE_OF_EACH],
)
@on_ranks()
def test_result_is_the_sum_of_what_was_sent(group, spec, world_size):
    for how in LAYOUTS:
        call, again = Call(group, spec, how), Call(group, spec, how)
        for step in range(STEPS):
            vector = call.lay_out(gradients(dist.get_rank(group), step))
            result, rest = call(vector, step)
            repeated, _ = again(vector, step)
            assert torch.equal(result, repeated), "not a function of vectors, key and state"
            check_sum(result, vector - rest, group, how)
        for name, value in call.method.state.items():
            assert value.isfinite().all() and is_same_everywhere(value, group), name


@both_ways
@pytest.mark.parametrize("spec", ONE_OF_EACH)
@on_ranks(3)
def test_the_ledger_has_the_bytes_of_the_uncompressed_reduction(group, spec, how):
    """Of three ranks each sends two thirds of a vector in a reduce-scatter, twice that in a sum."""
    ledger = Ledger()
    collective = make_collective(group, ledger, "gradients", Route(make_method(spec)))
    vector = LAYOUTS[how](gradients(dist.get_rank(group), 0), 3)
    before = vector.nbytes
    if how == "sum":
        collective.all_reduce(vector, 1.0, UNIT)
    else:
        collective.reduce_scatter(torch.empty(vector.numel() // 3), vector, 1.0, UNIT)
    raw = {"sum": 2 * 2 / 3, "sum_scatter": 2 / 3}[how] * before
    assert ledger.summary()["gradients"]["bytes_raw"] == pytest.approx(raw)


NAN, INFINITY = float("nan"), float("inf")


@every_method
@both_ways
@on_ranks(3)
def test_values_that_are_not_finite_show_on_all_ranks_and_are_not_kept(group, spec, how):
    rank, call = dist.get_rank(group), Call(group, spec, how)
    call(call.lay_out(gradients(rank, 0)), 0)
    # in a matrix, in a vector, in the last matrix, and in a step that is sent uncompressed
    places = {1: (0, NAN), 2: (37 * 40 + 3, INFINITY), 3: (-70, -INFINITY), 6: (5, NAN)}
    for step, (place, wrong) in places.items():
        vector = call.lay_out(gradients(rank, step))
        if rank == 1:
            vector[place] = wrong
        before = {name: value.clone() for name, value in call.method.state.items()}
        result, _ = call(vector, step)
        assert not result.isfinite().all(), step
        assert all(torch.equal(value, before[name]) for name, value in before.items())
        result, _ = call(call.lay_out(gradients(rank, step)), step)
        assert result.isfinite().all(), step


@every_method
@both_ways
@on_ranks(2)
def test_error_is_relative_at_any_magnitude(group, spec, how):
    found = []
    for factor in (1.0, 2.0**-100, 2.0**-40, 2.0**40):
        call = Call(group, spec, how)
        for step in range(2):
            matrices = [factor * m for m in gradients(dist.get_rank(group), step)]
            result, _ = call(call.lay_out(matrices), step)
        found.append(result / factor)
    plain, *scaled = found
    for each in scaled:
        assert (each - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("spec", ONE_OF_EACH)
@both_ways
@on_ranks(2)
def test_error_feedback_conserves_gradients_also_after_a_resume(group, spec, how):
    def make():
        route = Route(make_method(spec), feedback=ErrorFeedback())
        return make_collective(group, Ledger(), "gradients", route)

    def reduce(ours, vector):
        if how == "sum":
            ours.all_reduce(out := vector.clone(), 1.0, UNIT)
        else:
            ours.reduce_scatter(out := torch.empty(vector.numel() // 2), vector, 1.0, UNIT)
        return out

    ours, resumed, total, exact = make(), make(), 0, 0
    for step in range(STEPS):
        vector = LAYOUTS[how](gradients(dist.get_rank(group), step), 2)
        if step == STEPS - 1:
            resumed.load_state_dict(ours.state_dict())
            resumed.route.feedback.load_state_dict(ours.route.feedback.state_dict())
            again = reduce(resumed, vector)
        out = reduce(ours, vector)
        total, exact = total + out, exact + vector
    assert torch.equal(out, again)
    rest = sum(gathered(ours.route.feedback.state_dict()["layer*"], group))
    total = joined(total, group, how) + rest
    torch.testing.assert_close(total, sum(gathered(exact, group)), rtol=1e-3, atol=1e-3)
    assert rest.norm() > 0
