"""Shapes of a model are those that its units and sizes have, strategy by strategy."""

import json
import random

import pytest
import torch

from shardlab.choose.space import grid_documents
from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.memory import closed_form
from shardlab.models.parts import hidden_matrices
from shardlab.models.settings import Model, StepSize
from shardlab.models.sizes import ModelShapes, sizes_of
from shardlab.models.units import unit_sizes
from shardlab.predict.settings import Space
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.train.utilization import flops_per_token

OTHERS = (
    {"overrides": [{"layers": "0", "reshard_after_forward": False}]},
    {"wrap": "size", "wrap_size": 50_000},
    {"activation_checkpointing": "selective", "accumulation": 2},
    {"engine": "slide", "activation_checkpointing": "full", "accumulation": 4},
)


def some_strategies() -> list[CanonicalStrategy]:
    drawn = random.Random(0).sample([*grid_documents(Space(), layers=4, world_size=2)], 300)
    found = []
    for document in (*drawn, *OTHERS):
        try:
            found.append(parse_strategy(document).canonical())
        except UserError:  # the grid has illegal ones, too
            continue
    return found


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_strategies_share_is_what_each_has(on_gpu):
    step, device = StepSize(8, 64), torch.device("cuda" if on_gpu else "cpu")
    model = build_model(Model(preset="small"), 300, 32, 0, seed=0).module
    shapes = ModelShapes(model, step, on_gpu)
    for strategy in some_strategies():
        assert shapes.units(strategy) == unit_sizes(model, strategy, device)
        assert shapes.sizes(strategy) == sizes_of(model, strategy, step, device)


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
VISION = {**VISION, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_muon_keeps_one_moment_of_the_matrices_of_blocks():
    model = build_model(Model(preset="tiny"), 300, 64, 0, seed=0).module
    strategy = parse_strategy({"engine": "ddp"}).canonical()
    moments = [
        closed_form(strategy, sizes_of(model, strategy, step, torch.device("cpu")), 2)["moments"]
        for step in (StepSize(8, 64), StepSize(8, 64, optimizer="muon"))
    ]
    # of 2 blocks of width 96: queries, keys and values, what follows attention, and the network
    assert moments[0] == 8 * sum(p.numel() for p in model.parameters())
    assert moments[0] - moments[1] == 4 * 2 * (3 + 1 + 4 + 4) * 96**2
    with pytest.raises(UserError, match=r"no block of .* has a matrix that is trained: set adamw"):
        hidden_matrices(model.requires_grad_(False))


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ({"model_type": "gemma3_text", **TEXT}, 12 * 2 * 4 * 8 * 32),
        ({"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION}, 12 * 2 * 32 * 32),
        ({"model_type": "mamba", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}, 0),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_nested_and_attention_free_models_have_sizes(config, attention, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = build_model(Model(config=str(path)), 300, 32, 0, seed=0).module
    strategy = parse_strategy({"engine": "fsdp2"})
    sizes = sizes_of(model, strategy, StepSize(8, 64), torch.device("cpu"))
    assert (sizes.width, sizes.vocabulary) == (32, 300)
    assert {block.queries for block in sizes.blocks} == {attention // (12 * 2 * 32)}
    assert flops_per_token(model, 32) - flops_per_token(model, 0) == attention
