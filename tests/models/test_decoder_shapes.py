"""Closed forms of decoders: published numbers of parameters, and the models of transformers."""

import json

import pytest

from benchmarks.plans import mpt
from shardlab.core.errors import UserError
from shardlab.models.build import build_model
from shardlab.models.settings import Model, StepSize
from shardlab.models.shapes import PUBLISHED, DecoderShapes, decoder_of, read_decoder
from shardlab.models.sizes import ModelShapes
from shardlab.strategy.document import parse_strategy
from shardlab.train.utilization import flops_per_token

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}
"""of the model cards, or of the index of the safetensors files"""
OF_MPT = {
    "125m": 125_311_488,
    "350m": 355_985_408,
    "760m": 760_470_528,
    "1b": 1_315_950_592,
    "3b": 2_651_837_440,
    "7b": 6_658_859_008,
    "13b": 12_853_954_560,
    "30b": 29_975_214_080,
    "70b": 64_862_437_376,
}
"""NumParams of mosaicml/llm-foundry, scripts/train/benchmarking/README.md, at 2048 tokens"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_parameters(name):
    decoder = read_decoder(name)
    assert decoder is not None and decoder.parameters == COUNTS[name]


@pytest.mark.parametrize("name", OF_MPT)
def test_mpt_counts_as_a_gpt2(name):
    decoder = decoder_of(mpt(name), name)
    assert decoder is not None and decoder.parameters == OF_MPT[name]


GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 300}
GPT2 = {**GPT2, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
WITHOUT_KEYS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
CONFIGS = [
    GPT2,
    GPT2 | {"n_inner": 80, "activation_function": "gelu"},
    LLAMA,
    WITHOUT_KEYS,
    LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": None},
    LLAMA | {"model_type": "mistral"},
    LLAMA | {"model_type": "mistral", "sliding_window": 8},
    LLAMA | {"model_type": "mistral", "sliding_window": None},
    LLAMA | {"model_type": "qwen2"},
    LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    | {"sliding_window": 8},
    LLAMA | {"model_type": "qwen2", "sliding_window": 8},
    LLAMA | {"hidden_act": "gelu"},
    LLAMA | {"hidden_act": "relu"},
    LLAMA | {"model_type": "qwen3", "head_dim": 12},
    LLAMA | {"model_type": "qwen3", "attention_bias": True},
]
STRATEGIES = [
    {"engine": "ddp"},
    {"engine": "ddp", "bucket_mb": 0.01},
    {"engine": "ddp", "sync": {"every": 8, "codec": "int4"}},
    {"engine": "fsdp2", "param_dtype": "bf16", "activation_checkpointing": "full"},
    {"engine": "manual", "reshard_after_forward": False, "accumulation": 4},
    {"engine": "slide", "activation_checkpointing": "selective", "param_dtype": "bf16"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_shapes_are_those_of_the_model_in_transformers(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    step = StepSize(batch_size=8, sequence_length=32)
    model = build_model(Model(config=str(path)), 300, 32, 0, seed=0).module
    decoder = read_decoder(str(tmp_path))
    assert decoder is not None
    assert decoder.flops_per_token(32) == flops_per_token(model, 32)
    known, found = ModelShapes(model, step), DecoderShapes(decoder, step)
    for document in STRATEGIES:
        strategy = parse_strategy(document).canonical()
        assert found.sizes(strategy) == known.sizes(strategy), document
        elements = [unit.elements for unit in known.units(strategy)]
        assert [unit.elements for unit in found.units(strategy)] == elements, document


def test_other_types_and_names_of_the_hub_have_no_closed_form(tmp_path):
    path = tmp_path / "config.json"
    cross = GPT2 | {"add_cross_attention": True}
    for other in ({"model_type": "mamba"}, {"model_type": ["llama"]}, cross):
        path.write_text(json.dumps(other))
        assert read_decoder(str(path)) is None
    assert read_decoder("somebody/some-model") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds no mapping"),
        ("{", "config.json"),
        (json.dumps(LLAMA | {"hidden_size": "32"}), "hidden_size must be a whole number"),
        (
            json.dumps({**WITHOUT_KEYS, "model_type": "qwen2"}),
            "num_key_value_heads must be a whole",
        ),
        (json.dumps({**GPT2, "vocab_size": None}), "vocab_size must be a whole number"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**8}), "num_hidden_layers must be at most"),
        (json.dumps({"model_type": "x", "n_layer": 10**8}), "n_layer must be at most"),
    ],
)
def test_a_damaged_config_is_one_line(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_decoder(str(path))
