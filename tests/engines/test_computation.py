"""Checkpointing computes again just what it says, and changes no gradient."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2LMHeadModel

from shardlab.engines.common.units import prepare
from shardlab.models.presets import Shape, shape_config
from shardlab.strategy.strategy import parse_strategy

TOKENS = torch.arange(32).view(2, 16)


def gradients_and_flops(document):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(shape_config(Shape(3, 16, 2), 32, 16, 0))
    names = [name for name, _ in model.named_parameters()]
    prepare(model, parse_strategy(document).canonical())
    assert [name for name, _ in model.named_parameters()] == names
    with FlopCounterMode(display=False) as counter:
        model(input_ids=TOKENS).logits.square().mean().backward()
    return [p.grad for p in model.parameters()], counter


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same(mode):
    expected, _ = gradients_and_flops({})
    found, _ = gradients_and_flops({"activation_checkpointing": mode})
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_full_computes_blocks_again_and_selective_none_of_their_products():
    none, full, selective = (
        gradients_and_flops({"activation_checkpointing": mode})[1].get_total_flops()
        for mode in ("none", "full", "selective")
    )
    assert selective == none < full


def test_layers_may_differ():
    all_but_one = {
        "activation_checkpointing": "full",
        "overrides": [{"layers": 1, "activation_checkpointing": "none"}],
    }
    none, some, full = (
        gradients_and_flops(document)[1].get_total_flops()
        for document in ({}, all_but_one, {"activation_checkpointing": "full"})
    )
    assert 3 * (some - none) == 2 * (full - none) > 0
