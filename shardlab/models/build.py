"""The model of an experiment, without randomness in its forward pass, and its weights."""

import re
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shardlab.config.model_and_data import Model
from shardlab.core.errors import UserError
from shardlab.models.checkpoint import CheckpointWeights
from shardlab.models.presets import preset_config
from shardlab.models.weights import RandomWeights, Weights

_RANDOM = re.compile("drop|jitter")
"""names of noise settings in configurations, as in resid_pdrop or router_jitter_noise"""


class BuiltModel(NamedTuple):
    """A model on the meta device, with the source of its weights."""

    module: PreTrainedModel
    """on the meta device"""
    weights: Weights
    """initial weights, the same on every rank"""

    def whole(self) -> PreTrainedModel:
        """Return the module with all of its weights, float32 on the CPU."""
        self.weights.materialize(self.module)
        return self.module


def build_model(
    model: Model, vocabulary: int, positions: int, end_of_text: int, seed: int
) -> BuiltModel:
    """Build a causal language model whose forward pass has no randomness.

    Args:
        vocabulary: tokens of the tokenizer; a Hugging Face model must have at least as many.
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
        config = _huggingface_config(key, model.name, vocabulary, positions, end_of_text)
    try:
        # torch draws on the meta device, too: to no effect, and in half of the time of this call
        with torch.device("meta"), no_init_weights():
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        module.tie_weights()
    except Exception as error:  # a configuration may be wrong in any way
        raise UserError(
            f"model: cannot make a causal language model of {model.name!r}: "
            f"{' '.join(str(error).split())[:150]}"
        ) from None
    if model.config is not None:
        # the padding id of its own tokenizer is an ordinary token here, so it must be trained
        module.get_input_embeddings().padding_idx = None
    if model.pretrained is not None:
        return BuiltModel(module, CheckpointWeights(model.pretrained, module))
    return BuiltModel(module, RandomWeights(module, seed))


def _huggingface_config(
    key: str, source: str, vocabulary: int, positions: int, end_of_text: int
) -> PretrainedConfig:
    """Return the configuration of a Hugging Face model without randomness in its forward pass.

    Dropout is 0, so that equal seeds give equal losses on any number of ranks; `use_cache` is off;
    documents begin and end with `end_of_text`.

    Args:
        key: the parameter that names it, for messages.
        source: folder, config.json or name on the Hugging Face hub.
        vocabulary, positions, end_of_text: see `build_model`.

    Raises:
        UserError: it cannot be read, is no causal language model, or does not fit the tokenizer
            or the sequence length.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the library raises nothing narrower
        where = "" if Path(source).exists() else ", which is no folder or file here"
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"model.{key}: cannot load {source!r}{where}: {reason}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.{key}: {source!r} is no causal language model: {config.model_type}")
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"model.{key}: {source!r} is quantized, which cannot be trained")
    text = config.get_text_config()
    _check_fit(text, key, source, vocabulary, positions)
    _silence(config)
    for part in (config, text):
        part.use_cache = False
        part.bos_token_id = part.eos_token_id = end_of_text
    return cast(PretrainedConfig, config)


def _check_fit(
    config: PretrainedConfig, key: str, source: str, vocabulary: int, positions: int
) -> None:
    if config.vocab_size < vocabulary:
        other = "raise vocab_size in it, or " if key == "config" else ""
        raise UserError(
            f"model.{key}: vocabulary of {config.vocab_size} tokens, but the tokenizer has "
            f"{vocabulary}: {other}set tokenize.tokenizer to the model's own"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < positions:
        raise UserError(
            f"train.sequence_length: {positions}, but model.{key} {source!r} has {longest} "
            "positions: lower it"
        )


def _silence(config: PretrainedConfig) -> None:
    """Set every noise setting to 0, also in nested configurations."""
    for name, value in vars(config).items():
        if _RANDOM.search(name) and type(value) in (int, float):
            setattr(config, name, type(value)(0))
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _silence(part)
