"""Codecs of weights: random numbers are drawn once per update; saved weights stay exact."""

import pytest
import torch

import shardlab
from shardlab.comm import fsdp2_hooks
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, fsdp1, fsdp2, full
from tests.ranks import on_ranks


@pytest.fixture
def gathered(monkeypatch):
    """The name and the values of every unit that was gathered, in order."""
    seen = []

    def noting(self, **options):
        result = call(self, **options)
        seen.append((self._unit.name, options["output_tensor"].clone()))
        return result

    call = fsdp2_hooks._AllGatherHook.__call__
    monkeypatch.setattr(fsdp2_hooks._AllGatherHook, "__call__", noting)
    return seen


def attached(group, codec):
    model = fsdp2(group)
    handle = shardlab.attach(model, weights=codec, weights_minimum_size=100)
    # weights do not change, so differences come from random numbers
    return model, handle, torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "qsgd:levels=7", "natural"])
@on_ranks(2)
def test_weights_are_drawn_once_per_update(group, codec, gathered):
    model, _, sgd = attached(group, codec)
    steps = []
    for step in range(3):
        gathered.clear()
        backward(model, group, step)
        sgd.step()
        forward_and_backward = [[values for name, values in gathered if name == u] for u in "02"]
        assert all(torch.equal(*values) for values in forward_and_backward)
        steps.append(torch.cat([values[0] for values in forward_and_backward]))
    assert is_same_everywhere(torch.cat(steps), group)
    assert not any(torch.equal(steps[one], steps[other]) for one, other in ((0, 1), (1, 2), (0, 2)))


@on_ranks(2)
def test_accumulated_passes_gather_the_same_weights(group, gathered) -> None:
    model, *_ = attached(group, "int8:rounding=stochastic")
    for step in range(2):
        backward(model, group, step)
    values = [values for name, values in gathered if name == "0"]
    assert len(values) == 4 and all(torch.equal(values[0], other) for other in values)


@on_ranks(2)
def test_resumed_run_gathers_the_weights_of_an_uninterrupted_run(group, gathered) -> None:
    model, handle, sgd = attached(group, "int8:rounding=stochastic")
    backward(model, group, 0)
    sgd.step()
    saved = handle.state_dict()
    other, fresh, _ = attached(group, "int8:rounding=stochastic")
    fresh.load_state_dict(saved)
    gathered.clear()
    backward(model, group, 1)
    straight = list(gathered)
    gathered.clear()
    backward(other, group, 1)
    assert len(straight) == len(gathered)
    for (name, values), (again, found) in zip(straight, gathered, strict=True):
        assert name == again and torch.equal(values, found)


@on_ranks(2)
def test_fsdp1_gathers_compressed_and_shows_exact_parameters(group):
    plain, compressed = fsdp1(group), fsdp1(group)
    shardlab.attach(plain)
    handle = shardlab.attach(compressed, weights="int8", weights_minimum_size=100)
    exact, lossy = (model(torch.ones(1, 40)) for model in (plain, compressed))
    assert 0 < (lossy - exact).norm() / exact.norm() < 0.02
    before, after = (full(model, "data") for model in (plain, compressed))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert handle.ledger.summary()["weights"]["compression_ratio"] > 3
    handle.detach()
    assert torch.equal(compressed(torch.ones(1, 40)), exact)
