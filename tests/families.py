"""Small random models of several families, tied and untied."""

from typing import Any

from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

VOCABULARY = 300
POSITIONS = 64

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_GPT2_SIZES = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# the models themselves: imported here once, they need not be in every rank that is forked
_MODELS = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "mixtral": MixtralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
FAMILIES = [f"{name}-{tying}" for name in _MODELS for tying in ("tied", "untied")]


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a name in `FAMILIES`, with dropout where the family has it."""
    name, tying = family.split("-")
    sizes = _GPT2_SIZES if name == "gpt2" else {**_SIZES, "attention_dropout": 0.2}
    return _MODELS[name].config_class(
        **{**sizes, "tie_word_embeddings": tying == "tied", **changes}
    )
