"""The model of an experiment before its first step."""

from shardlab.data.tokens.tokens import TokenSplit
from shardlab.experiment.schema import Model, Train
from shardlab.models.build import BuiltModel, build_model


def build_for(model: Model, train: Train, seed: int, split: TokenSplit) -> BuiltModel:
    """A model whose vocabulary and positions fit the tokens and the sequence length."""
    return build_model(model, split.vocabulary, train.sequence_length, split.end_of_text, seed)
