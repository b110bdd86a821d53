"""Codecs of weights: random ones draw once per update; what is saved stays exact."""

import pytest
import torch

import shardlab
from shardlab.comm import fsdp2_hooks
from tests.comm.wrapped_models import backward, fsdp1, fsdp2, full
from tests.ranks import on_ranks, run_ranks


@pytest.fixture
def gathered(monkeypatch):
    """What every unit gathered, in order; the name of a unit and the values."""
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
    # the weights stay as they are: what differs was drawn
    return model, handle, torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "qsgd:levels=7", "natural"])
def test_forward_and_backward_see_the_same_weights_and_the_next_step_others(codec, gathered):
    def on_rank(group):
        model, _, sgd = attached(group, codec)
        steps = []
        for step in range(3):
            gathered.clear()
            backward(model, group, step)
            sgd.step()
            by_unit = {}
            for name, values in gathered:
                by_unit.setdefault(name, []).append(values)
            assert [len(by_unit[name]) for name in ("0", "2")] == [2, 2]
            assert all(torch.equal(*by_unit[name]) for name in ("0", "2"))
            steps.append(torch.cat([by_unit["0"][0], by_unit["2"][0]]))
        return {"steps": torch.stack(steps)}

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["steps"], second["steps"])
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(first["steps"][one], first["steps"][other])


@on_ranks(2)
def test_accumulated_passes_see_the_same_weights(group, gathered) -> None:
    model, *_ = attached(group, "int8:rounding=stochastic")
    for step in range(2):
        backward(model, group, step)
    values = [values for name, values in gathered if name == "0"]
    assert len(values) == 4 and all(torch.equal(values[0], other) for other in values)


@on_ranks(2)
def test_a_resumed_run_draws_what_the_next_step_would_have(group, gathered) -> None:
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


def test_fsdp1_gathers_through_the_codec_and_shows_exact_parameters():
    def on_rank(group):
        plain, coded = fsdp1(group), fsdp1(group)
        shardlab.attach(plain)
        handle = shardlab.attach(coded, weights="int8", weights_minimum_size=100)
        outputs = [model(torch.ones(1, 40)) for model in (plain, coded)]
        error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
        before, after = (full(model, "data") for model in (plain, coded))
        assert all(torch.equal(before[name], after[name]) for name in before)
        handle.detach()
        assert torch.equal(coded(torch.ones(1, 40)), outputs[0])
        ratio = handle.ledger.summary()["weights"]["compression_ratio"]
        return {"error": error, "ratio": torch.tensor(ratio)}

    result = run_ranks(2, on_rank)[0]
    assert 0 < result["error"] < 0.02
    assert result["ratio"] > 3
