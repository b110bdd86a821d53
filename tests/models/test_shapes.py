"""Shapes of a model are those that its units and sizes have, strategy by strategy."""

import random

import pytest
import torch

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Space, Train
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.sizes import ModelShapes, sizes_of
from shardlab.models.units import unit_sizes
from shardlab.search.space import documents

OTHERS = (
    {"overrides": [{"layers": "0", "reshard_after_forward": False}]},
    {"wrap": "size", "wrap_size": 50_000},
    {"activation_checkpointing": "selective", "accumulation": 2},
    {"engine": "slide", "activation_checkpointing": "full", "accumulation": 4},
)


def some_strategies() -> list[CanonicalStrategy]:
    drawn = random.Random(0).sample([*documents(Space(), layers=4, world_size=2)], 300)
    found = []
    for document in (*drawn, *OTHERS):
        try:
            found.append(parse_strategy(document).canonical())
        except UserError:  # the grid has illegal ones, too
            continue
    return found


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_strategies_share_is_what_each_has(on_gpu):
    train, device = Train(batch_size=8), torch.device("cuda" if on_gpu else "cpu")
    model = build_model(Model(preset="small"), 300, 32, 0, seed=0).module
    shapes = ModelShapes(model, train, on_gpu)
    for strategy in some_strategies():
        assert shapes.units(strategy) == unit_sizes(model, strategy, device)
        assert shapes.sizes(strategy) == sizes_of(model, strategy, train, device)
