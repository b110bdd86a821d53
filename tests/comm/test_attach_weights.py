"""Codecs of weights: forward and backward share random numbers; saved weights stay exact."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

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
    handle = shardlab.attach(model, weights={"codec": codec, "minimum_size": 100})
    # weights do not change, so differences come from random numbers
    return model, handle, torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "qsgd:levels=7", "natural"])
@on_ranks(2)
def test_weights_are_drawn_once_per_step(group, codec, gathered):
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


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "qsgd:levels=7"])
@on_ranks(2)
def test_a_unit_has_one_draw_in_forward_and_backward_whatever_else_is_updated(
    group, codec, gathered
):
    """Its output is used in the steps of another unit, and goes back through it later."""
    both = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in ("made", "judge")})
    for part in both.values():
        fully_shard(part, reshard_after_forward=True)
    shardlab.attach(both, weights={"codec": codec, "minimum_size": 100})
    of_made, of_judge = (torch.optim.SGD(part.parameters(), lr=0.0) for part in both.values())
    draws = []
    for _ in range(3):
        gathered.clear()
        output = both["made"](torch.ones(2, 64, requires_grad=True))
        (both["judge"](torch.ones(2, 64)) - both["judge"](output.detach())).mean().backward()
        of_judge.step()
        both["judge"](output).mean().backward()
        of_made.step()
        first, *again = [values for name, values in gathered if name == "made"]
        assert again and all(torch.equal(first, values) for values in again)
        # two forward passes and their backward passes, before the update
        judged = [values for name, values in gathered if name == "judge"]
        assert all(torch.equal(judged[0], values) for values in judged[:3])
        assert not torch.equal(judged[0], judged[-1])
        draws.append(first)
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])


@on_ranks(2)
def test_a_saved_state_continues_the_draws(group, gathered):
    """Also after an evaluation."""
    model, handle, sgd = attached(group, "int8:rounding=stochastic")

    def drawn(model, sgd, step):
        gathered.clear()
        backward(model, group, step)
        sgd.step()
        return torch.cat([values for name, values in gathered if name == "0"])

    drawn(model, sgd, 0)
    with torch.no_grad():
        model(torch.ones(1, 40))
    saved = handle.state_dict()
    expected = [drawn(model, sgd, step) for step in (1, 2)]
    model, handle, sgd = attached(group, "int8:rounding=stochastic")
    handle.load_state_dict(saved)
    assert all(torch.equal(drawn(model, sgd, 1 + i), want) for i, want in enumerate(expected))


@pytest.mark.parametrize("wrap", [fsdp1, fsdp2])
@on_ranks(2)
def test_gathers_are_compressed_and_parameters_stay_exact(group, wrap):
    plain, compressed = wrap(group), wrap(group)
    shardlab.attach(plain)
    handle = shardlab.attach(compressed, weights={"codec": "int8", "minimum_size": 100})
    exact, lossy = (model(torch.ones(1, 40)) for model in (plain, compressed))
    assert 0 < (lossy - exact).norm() / exact.norm() < 0.05
    summary = handle.ledger.summary()["weights"]
    assert summary["compression_ratio"] > 3
    assert summary["uncompressed"] == {"fewer than 100 elements": 1}
    before, after = (full(model, "data") for model in (plain, compressed))
    assert all(torch.equal(before[name], after[name]) for name in before)
    handle.detach()
    assert torch.equal(compressed(torch.ones(1, 40)), exact)
