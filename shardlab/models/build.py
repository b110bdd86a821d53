"""Builds the model of an experiment, the same on every rank for the same seed."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from shardlab.core.errors import UserError
from shardlab.core.params import Model
from shardlab.models.presets import preset_config


def build_model(
    model: Model, vocabulary: int, positions: int, end_of_text: int, seed: int
) -> PreTrainedModel:
    """A float32 causal language model on the CPU.

    Args:
        vocabulary: tokens of the tokenizer; a pretrained model must have at least as many.
        positions: longest sequence.
        end_of_text: id of the token between documents.
        seed: of the random weights.

    Raises:
        UserError: the pretrained model is absent or does not fit the tokenizer.
    """
    torch.manual_seed(seed)
    if model.preset is not None:
        return GPT2LMHeadModel(preset_config(model.preset, vocabulary, positions, end_of_text))
    try:
        built = AutoModelForCausalLM.from_pretrained(str(model.pretrained), dtype=torch.float32)
    except OSError as error:
        raise UserError(
            f"model.pretrained: cannot load {model.pretrained!r}: {' '.join(str(error).split())}"
        ) from None
    if built.config.vocab_size < vocabulary:
        raise UserError(
            f"model.pretrained: vocabulary of {built.config.vocab_size} tokens, but the tokenizer "
            f"has {vocabulary}: set tokenize.tokenizer to the model's own"
        )
    return built


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the longest `ModuleList` in it.

    Raises:
        UserError: the model has no list of blocks.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(
            f"model: {type(model).__name__} has no list of blocks to wrap: use wrap: root"
        )
    return list(max(lists, key=lambda blocks: sum(1 for _ in blocks)))
