"""Floating-point operations of a model, counted by formula and as torch counts them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardlab.train.utilization import (
    flops_per_token,
)
from tests.families import config_of


@pytest.mark.parametrize("family", ["gpt2-tied", "gpt2-untied", "llama-tied", "qwen3-untied"])
def test_flops_formula_matches_the_flop_counter(family):
    length = 32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
        tokens = torch.zeros(2, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    # the formula takes biases and normalisations for matrices, and the first layer's inputs for
    # what has a gradient
    assert flops_per_token(model, length) == pytest.approx(counted, rel=0.03)
