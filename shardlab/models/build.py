"""The model of an experiment: architecture and source of its weights."""

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardlab.core.errors import UserError
from shardlab.experiment.schema import Model
from shardlab.models.checkpoint import CheckpointWeights
from shardlab.models.huggingface import foreign_config
from shardlab.models.presets import preset_config
from shardlab.models.weights import RandomWeights, Weights


class BuiltModel(NamedTuple):
    """A model on the meta device, with the source of its weights."""

    module: PreTrainedModel
    """on the meta device"""
    weights: Weights
    """first weights, the same on every rank"""

    def whole(self) -> PreTrainedModel:
        """Return the module with all of its weights, float32 on the CPU."""
        self.weights.materialize(self.module)
        return self.module


def build_model(
    model: Model, vocabulary: int, positions: int, end_of_text: int, seed: int
) -> BuiltModel:
    """Build a causal language model whose forward pass has no randomness.

    Args:
        vocabulary: tokens of the tokenizer; other people's models must have at least as many.
        positions: longest sequence.
        end_of_text: id of the token between documents.
        seed: of random weights.

    Raises:
        UserError: the model is absent, damaged or of a wrong kind, or does not fit the tokenizer
            or the sequence length.
    """
    config: PretrainedConfig
    if model.preset is not None:
        config = preset_config(model.preset, vocabulary, positions, end_of_text)
    else:
        key = "pretrained" if model.pretrained is not None else "config"
        config = foreign_config(key, model.name, vocabulary, positions, end_of_text)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # a configuration may be wrong in any way
        raise UserError(
            f"model: cannot make a causal language model of {model.name!r}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None
    if model.config is not None:
        # the padding id of its own tokenizer is an ordinary token here, so it must be trained
        module.get_input_embeddings().padding_idx = None
    if model.pretrained is not None:
        return BuiltModel(module, CheckpointWeights(model.pretrained, module))
    return BuiltModel(module, RandomWeights(module, seed))
