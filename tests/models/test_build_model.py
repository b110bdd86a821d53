"""Presets have the size that they are named after, and other people's models load."""

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shardlab.core.errors import UserError
from shardlab.core.params import Model
from shardlab.models.build import build_model, transformer_blocks
from shardlab.models.presets import PRESETS, preset_config

GPT2_VOCABULARY = 50257


@pytest.mark.parametrize(
    ("name", "millions"), [("10m", 10), ("62m", 62), ("90m", 90), ("300m", 300)]
)
def test_a_preset_is_as_large_as_its_name(name, millions):
    with torch.device("meta"):
        model = GPT2LMHeadModel(preset_config(name, GPT2_VOCABULARY, 1024, 0))
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == pytest.approx(millions * 1e6, rel=0.06)


def test_equal_seeds_give_equal_weights():
    def weights(seed):
        model = build_model(Model(preset="tiny"), 300, 16, 0, seed)
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.fixture
def llama(tmp_path):
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_another_family_loads_and_its_blocks_are_found(llama):
    model = build_model(Model(pretrained=str(llama)), 300, 16, 0, seed=0)
    assert {type(block).__name__ for block in transformer_blocks(model)} == {"LlamaDecoderLayer"}
    assert len(transformer_blocks(model)) == 3


def test_a_model_that_does_not_fit_is_refused_in_one_line(llama, tmp_path):
    with pytest.raises(UserError, match="vocabulary of 300 tokens") as small:
        build_model(Model(pretrained=str(llama)), 301, 16, 0, seed=0)
    with pytest.raises(UserError, match="cannot load") as absent:
        build_model(Model(pretrained=str(tmp_path / "absent")), 300, 16, 0, seed=0)
    assert all("\n" not in str(caught.value) for caught in (small, absent))


def test_every_preset_is_offered_in_the_parameters():
    for name in PRESETS:
        assert Model(preset=name).preset == name
