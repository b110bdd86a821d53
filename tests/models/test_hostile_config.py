"""Configurations of a size or a range that nobody would choose are refused in one line."""

import json
import math

import pytest

from shardlab.config.model_and_data import Model
from shardlab.core.errors import UserError
from shardlab.models.build import build_model

SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 300},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "vocab_size": 300,
    },
}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 10**12},
        {"vocab_size": 10**19},
        {"initializer_range": math.nan},
        {"initializer_range": -1.0},
    ],
)
def test_a_hostile_model_config_is_one_line(family, change, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **SIZES[family], **change}))
    with pytest.raises(UserError) as refusal:
        build_model(Model(config=str(path)), 300, 16, 0, 0).whole()
    message = str(refusal.value).replace(str(path), "config.json")
    assert "\n" not in message and len(message) <= 300
