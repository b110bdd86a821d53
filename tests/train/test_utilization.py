"""Floating-point operations of a model, counted by formula and as torch counts them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardlab.core.host import resident_memory
from shardlab.train.utilization import (
    MemoryMeter,
    flops_per_token,
    peak_memory,
    product_flops_per_s,
)
from tests.families import config_of
from tests.ranks import run_ranks


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


def test_product_rate_is_measured_on_all_ranks():
    def on_rank(group):
        speed = product_flops_per_s(torch.device("cpu"), torch.float32, group)
        return {"speed": torch.tensor(speed)}

    assert all(result["speed"] > 1e8 for result in run_ranks(2, on_rank))


def test_memory_is_that_of_the_device_that_computes(monkeypatch):
    host = resident_memory().highest
    assert host <= peak_memory(torch.device("cpu")) <= resident_memory().highest
    for name, value in (
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 100),
        ("max_memory_allocated", 350),
        ("max_memory_reserved", 400),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    used = MemoryMeter(torch.device("cuda")).used()
    peaks = used.memory_peak_bytes, used.memory_growth_bytes, used.memory_reserved_bytes
    assert peaks == (350, 250, 400)
