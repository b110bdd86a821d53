"""Models to train: presets and Hugging Face configurations."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shardlab.core.errors import UserError
from shardlab.models.checkpoint_weights import CheckpointWeights
from shardlab.models.parts import has_dropout
from shardlab.models.pretrained import positions_of
from shardlab.models.random_weights import RandomWeights
from shardlab.models.settings import Model, Shape
from shardlab.models.weights import WeightSource


def shape_config(
    shape: Shape, vocabulary: int, positions: int, end_of_text: int, dropout: float = 0.0
) -> GPT2Config:
    """Return the configuration of a GPT-2 of any shape.

    Weights start with deviation 1/sqrt(width), which keeps activations at their scale (Glorot and
    Bengio 2010): GPT-2's own 0.02 leaves a narrow model at unigram statistics for long.
    """
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        initializer_range=shape.width**-0.5,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
    )


_RANDOM = re.compile("drop|jitter")
"""names of noise settings in configurations, as in resid_pdrop or router_jitter_noise"""
_NO_DROPOUT = re.compile("jitter|layer|path|classif|summary|token")
"""those among them that drop no elements between layers: whole layers, tokens, or what only heads
of other tasks see, as in layerdrop or summary_first_dropout"""
_THRESHOLDS = {"phimoe": "router_jitter_noise"}
"""settings by type of model that have such a name, and are part of the model all the same"""


class BuiltModel(NamedTuple):
    """A model on the meta device, with the source of its weights."""

    module: PreTrainedModel
    """on the meta device"""
    weights: WeightSource
    """initial weights, the same on every rank"""

    @property
    def parameters(self) -> int:
        """Number of parameters; one that modules share counts once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def whole(self) -> PreTrainedModel:
        """Return the module with all of its weights, float32 on the CPU."""
        self.weights.materialize(self.module)
        return self.module


def build_model(
    model: Model, vocabulary: int, positions: int, end_of_text: int, seed: int
) -> BuiltModel:
    """Build a causal language model whose forward pass has no randomness but `model.dropout`.

    Args:
        vocabulary: tokens of the tokenizer; a Hugging Face model must have at least as many.
        positions: longest sequence.
        end_of_text: id of the token between documents.
        seed: of random weights.

    Raises:
        UserError: the model is absent, damaged or of a wrong kind, or does not fit the tokenizer
            or the sequence length, or cannot drop what it is to drop.
    """
    config: PretrainedConfig
    key = "pretrained" if model.pretrained is not None else "config"
    if (shape := model.shape) is not None:
        config = shape_config(shape, vocabulary, positions, end_of_text, model.dropout)
    else:
        config = _huggingface_config(key, model.name, vocabulary, end_of_text, model.dropout)
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
    if shape is None:
        which = f"model.{key} {model.name!r}"
        _check_order(module, which)
        _check_positions(module, which, positions)
        if model.dropout and not has_dropout(module):
            raise UserError(
                f"model.dropout: {type(module).__name__} of {which} has no dropout: remove it"
            )
        # rows are not padded here: the padding token is an ordinary one, often that between
        # documents, so its row must be trained
        module.get_input_embeddings().padding_idx = None
    _forget_drawn(module)
    if model.pretrained is not None:
        return BuiltModel(module, CheckpointWeights(model.pretrained, module))
    return BuiltModel(module, RandomWeights(module, seed))


def _huggingface_config(
    key: str, source: str, vocabulary: int, end_of_text: int, dropout: float
) -> PretrainedConfig:
    """Return the configuration of a Hugging Face model without randomness in its forward pass but
    `dropout`; `use_cache` is off; documents begin and end with `end_of_text`.

    Args:
        key: the parameter that names it, for messages.
        source: folder, config.json or name on the Hugging Face hub.
        vocabulary, end_of_text: see `build_model`.
        dropout: of its configuration's dropout settings; other noise is 0.

    Raises:
        UserError: it cannot be read, is no causal language model, or does not fit the tokenizer.
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
    _check_fit(text, key, vocabulary)
    _set_noise(config, dropout)
    for part in (config, text):
        part.use_cache = False
        part.bos_token_id = end_of_text
        # a chat model may stop at several tokens
        ends = getattr(part, "eos_token_id", None)
        if not (key == "pretrained" and isinstance(ends, list) and end_of_text in ends):
            part.eos_token_id = end_of_text
    return cast(PretrainedConfig, config)


def _check_fit(config: PretrainedConfig, key: str, vocabulary: int) -> None:
    if config.vocab_size < vocabulary:
        other = "raise vocab_size in it, or " if key == "config" else ""
        raise UserError(
            f"model.{key}: vocabulary of {config.vocab_size} tokens, but the tokenizer has "
            f"{vocabulary}: {other}set tokenize.tokenizer to the model's own"
        )


def _check_positions(module: PreTrainedModel, which: str, positions: int) -> None:
    longest = positions_of(module)
    if longest is not None and longest < positions:
        raise UserError(
            f"train.sequence_length: {positions}, but {which} has {longest} positions: lower it"
        )


def _check_order(module: PreTrainedModel, which: str) -> None:
    """Refuse an encoder, whose tokens see later ones.

    An encoder of other input, such as an audio tower, lies beside what reads the tokens. That a
    prediction sees later tokens in any other way shows in validation alone: there are no weights
    here, and no rank need have the memory for all of them.
    """
    # GPT-NeoX is causal whatever is_decoder says; the layers of encoders look at it
    if any(getattr(part, "is_decoder", True) is False for part in module.get_decoder().modules()):
        raise UserError(
            f"{which} is an encoder, whose predictions see the tokens that they predict: "
            "set is_decoder in its config.json to true, or take a causal model"
        )


def _forget_drawn(module: nn.Module) -> None:
    """Move every parameter to the meta device.

    Some are drawn on the CPU all the same (DiffLlama's by `torch.normal`), and what is not on the
    meta device is filled neither from the checkpoint nor by the seed.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                part.register_parameter(
                    name, nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                )


def _set_noise(config: PretrainedConfig, dropout: float) -> None:
    """Set every dropout setting to that, and other noise to 0, also in nested configurations."""
    for part in _parts(config):
        for name, value in vars(part).items():
            threshold = name == _THRESHOLDS.get(part.model_type)
            if _RANDOM.search(name) and type(value) in (int, float) and not threshold:
                is_dropout = dropout and not _NO_DROPOUT.search(name)
                try:
                    setattr(part, name, dropout if is_dropout else type(value)(0))
                except Exception:  # the library raises nothing narrower
                    raise UserError(
                        f"model.dropout: {name} of its configuration cannot be {dropout}: remove it"
                    ) from None


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Iterate over a configuration and those that it holds."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)
