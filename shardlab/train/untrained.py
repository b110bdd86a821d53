"""The model of an experiment before its first step."""

from shardlab.core.params import Model, Train
from shardlab.data.tokens import TokenSplit
from shardlab.models.build import BuiltModel, build_model


def build_for(model: Model, train: Train, seed: int, split: TokenSplit) -> BuiltModel:
    """A model whose vocabulary and positions fit the tokens and the sequence length."""
    return build_model(model, split.vocabulary, train.sequence_length, split.end_of_text, seed)
