"""Codecs of weights: random numbers are drawn once per update; saved weights stay exact."""

import pytest
import torch

import shardlab
from shardlab.comm.codec_collective import CodecCollective
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, fsdp1, fsdp2, full
from tests.ranks import on_ranks


@pytest.fixture
def gathered(monkeypatch):
    """The name and the values of every unit that was gathered, in order."""
    seen = []

    def noting(self, output, shard, unit, call=CodecCollective.all_gather):
        call(self, output, shard, unit)
        seen.append((unit.name, output.clone()))

    monkeypatch.setattr(CodecCollective, "all_gather", noting)
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


@pytest.mark.parametrize("wrap", [fsdp1, fsdp2])
@on_ranks(2)
def test_gathers_are_compressed_and_parameters_stay_exact(group, wrap):
    plain, compressed = wrap(group), wrap(group)
    shardlab.attach(plain)
    handle = shardlab.attach(compressed, weights="int8", weights_minimum_size=100)
    exact, lossy = (model(torch.ones(1, 40)) for model in (plain, compressed))
    assert 0 < (lossy - exact).norm() / exact.norm() < 0.05
    summary = handle.ledger.summary()["weights"]
    assert summary["compression_ratio"] > 3
    assert summary["uncompressed"] == {"fewer than 100 elements": 1}
    before, after = (full(model, "data") for model in (plain, compressed))
    assert all(torch.equal(before[name], after[name]) for name in before)
    handle.detach()
    assert torch.equal(compressed(torch.ones(1, 40)), exact)
