"""The laws of `shardlab.codecs.multi_phase.MultiPhaseMethod` on real ranks, for every method."""

import pytest
import torch
import torch.distributed as dist

from tests.codecs.codec_examples import METHODS
from tests.comm.phase_vectors import LAYOUTS, Call, gradients
from tests.ranks import run_ranks

every_method = pytest.mark.parametrize("spec", METHODS)
both_ways = pytest.mark.parametrize("how", list(LAYOUTS))
STEPS = 4


@every_method
@both_ways
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_result_is_the_sum_of_what_was_sent(spec, how, world_size):
    def on_rank(group):
        call, again, found = Call(group, spec, how), Call(group, spec, how), {}
        for step in range(STEPS):
            vector = call.lay_out(gradients(dist.get_rank(group), step))
            result, rest = call(vector, step)
            repeated, _ = again(vector, step)
            assert torch.equal(result, repeated), "not a function of vectors, key and state"
            found |= {f"result{step}": result, f"sent{step}": vector - rest}
        assert all(value.isfinite().all() for value in call.method.state.values())
        return found | {f"state {name}": value for name, value in call.method.state.items()}

    ranks = run_ranks(world_size, on_rank)
    for name, value in ranks[0].items():
        if name.startswith("state"):
            assert all(torch.equal(value, other[name]) for other in ranks), name
    for step in range(STEPS):
        sent = sum(found[f"sent{step}"] for found in ranks)
        parts = [found[f"result{step}"] for found in ranks]
        if how == "sum":
            assert all(torch.equal(parts[0], part) for part in parts)
        whole = parts[0] if how == "sum" else torch.cat(parts)
        torch.testing.assert_close(whole, sent, rtol=1e-4, atol=1e-4)
        assert whole.any()


@every_method
@both_ways
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_shows_on_all_ranks_and_stays_nowhere(spec, how, wrong):
    def on_rank(group):
        rank, call, seen = dist.get_rank(group), Call(group, spec, how), []
        call(call.lay_out(gradients(rank, 0)), 0)
        # in a matrix, in a vector, in the last matrix, and in a step that is sent as it is
        for step, place in ((1, 0), (2, 37 * 40 + 3), (3, -70), (6, 5)):
            vector = call.lay_out(gradients(rank, step))
            if rank == 1:
                vector[place] = wrong
            before = {name: value.clone() for name, value in call.method.state.items()}
            result, rest = call(vector, step)
            seen.append(not result.isfinite().all() and not rest.any())
            assert all(torch.equal(value, before[name]) for name, value in before.items())
            result, _ = call(call.lay_out(gradients(rank, step)), step)
            seen.append(bool(result.isfinite().all()))
        return {"seen": torch.tensor(seen)}

    for found in run_ranks(3, on_rank):
        assert found["seen"].all(), found["seen"]


@every_method
@both_ways
def test_zeros_are_summed_to_zeros_and_spoil_nothing(spec, how):
    def on_rank(group):
        call, found = Call(group, spec, how), {}
        for step in range(STEPS):
            matrices = gradients(dist.get_rank(group), step)
            vector = call.lay_out([m * (step % 2) for m in matrices])
            result, rest = call(vector, step)
            assert step % 2 or not (result.any() or rest.any())
            found |= {f"result{step}": result, f"sent{step}": vector - rest}
        return found

    ranks = run_ranks(2, on_rank)
    for step in (1, 3):
        parts = [found[f"result{step}"] for found in ranks]
        whole = parts[0] if how == "sum" else torch.cat(parts)
        sent = sum(found[f"sent{step}"] for found in ranks)
        torch.testing.assert_close(whole, sent, rtol=1e-4, atol=1e-4)
        assert whole.any()


@every_method
@both_ways
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**-40, 2.0**40])
def test_magnitudes_far_from_one_are_sent_as_well(spec, how, magnitude):
    def on_rank(group):
        found = {}
        for name, factor in (("plain", 1.0), ("scaled", magnitude)):
            call = Call(group, spec, how)
            for step in range(2):
                matrices = [factor * m for m in gradients(dist.get_rank(group), step)]
                result, _ = call(call.lay_out(matrices), step)
            found[name] = result / factor
        return found

    for found in run_ranks(2, on_rank):
        norm, error = found["plain"].norm(), (found["scaled"] - found["plain"]).norm()
        assert error < 0.01 * norm
