"""Blocks, embedding and head of models of any family, on any device."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardlab.core.errors import UserError
from shardlab.models.parts import model_parts, transformer_blocks
from tests.families import FAMILIES, config_of


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_every_family(family, device):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(family))
    parts = model_parts(model)
    layers = model.transformer.h if family.startswith("gpt2") else model.model.layers
    assert parts.blocks == list(layers)
    assert [model.get_submodule(path) for path in parts.paths] == parts.blocks
    assert parts.embedding is model.get_input_embeddings()
    assert parts.head is model.lm_head
    assert parts.tied == family.endswith("-tied")


def test_experts_are_no_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
            self.norm = nn.LayerNorm(8)

    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2))})
    assert transformer_blocks(model) == list(model["layers"])


def test_blocks_of_a_model_of_plain_torch():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    parts = model_parts(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    assert parts.paths == ["layers.0", "layers.1", "layers.2"]
    assert (parts.embedding, parts.head, parts.tied) == (None, None, False)
    stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    assert transformer_blocks(nn.ModuleDict({"body": stack, "end": nn.Linear(8, 2)})) == list(stack)


def test_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="Linear has no list of blocks"):
        model_parts(nn.Linear(2, 2))
