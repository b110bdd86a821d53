"""Configurations of Hugging Face models, with all randomness of the forward pass removed."""

import re
from pathlib import Path
from typing import cast

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shardlab.core.errors import UserError

_RANDOM = re.compile("drop|jitter")
"""names of noise settings in configurations, as in resid_pdrop or router_jitter_noise"""


def foreign_config(
    key: str, source: str, vocabulary: int, positions: int, end_of_text: int
) -> PretrainedConfig:
    """Return the configuration of a Hugging Face model without randomness in its forward pass.

    Dropout is off, so that equal seeds give equal losses on any number of ranks, and nothing is
    cached. Documents end as the tokens say.

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
        reason = " ".join(str(error).split())
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
