"""A pretrained model keeps the conventions of its own tokenizer, up to its final_model."""

import json
import math

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from shardlab.data.corpus_file import write_corpus
from shardlab.data.settings import Tokenize
from shardlab.data.sources import generate
from shardlab.data.tokenize import build_tokens, is_validation
from shardlab.data.tokenizer import train_tokenizer
from shardlab.data.tokens import open_split
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.train.evaluation import evaluate, save_model

LENGTH = 512
DOCUMENTS = list(generate(40))
VALIDATION = min(
    (each for each in DOCUMENTS if is_validation(each.split_key, 0.1)), key=lambda each: each.size
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<end>{% endfor %}"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model that puts <begin> before a text, ends with <end>, and pads with <pad>."""
    folder = tmp_path_factory.mktemp("chat-model")
    inner = train_tokenizer((each.content for each in DOCUMENTS), 300)
    inner.save(folder)
    own = AutoTokenizer.from_pretrained(folder)
    own.add_special_tokens({"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>"})
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", own.bos_token_id)]
    )
    own.chat_template = TEMPLATE
    # never in a text: the model needs no row for it
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    own.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(own) - 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.5,
        bos_token_id=own.bos_token_id,
        eos_token_id=[own.eos_token_id, 0],
        pad_token_id=own.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(chat_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_corpus(
        folder / "corpus.json",
        [
            each
            for each in DOCUMENTS
            if each == VALIDATION or not is_validation(each.split_key, 0.1)
        ],
    )
    options = Tokenize(tokenizer=str(chat_model), shards=1)
    build_tokens(folder / "corpus.json", 0.1, options, folder / "work", folder)
    return folder


def built(chat_model, split):
    model = Model(pretrained=str(chat_model))
    return build_model(model, split.vocabulary, LENGTH, split.end_of_text, 0).whole()


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "qwen2": {"intermediate_size": 48, "num_key_value_heads": 1, "tie_word_embeddings": True},
    # multiplies its embeddings
    "gemma": {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"intermediate_size": 48, "num_key_value_heads": 1, "sliding_window": 20},
    # its first position is the third
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_that_of_transformers_for_the_same_text(chat_model, data, family, tmp_path):
    """In windows of 64 predicted tokens."""
    split = open_split(data / "tokens", "validation")
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    ids = [*tokenizer(VALIDATION.content)["input_ids"], tokenizer.eos_token_id]
    assert split.read(0, len(split)).tolist() == ids
    folder = chat_model
    if FAMILIES[family]:
        folder = tmp_path
        config = AutoConfig.for_model(
            family, vocab_size=len(tokenizer), **{**SIZES, **FAMILIES[family]}
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    windows = [torch.tensor([ids[i : i + 65]]) for i in range(0, len(ids) - 1, 64)]
    with torch.no_grad():
        nats = sum(theirs(w, labels=w).loss.item() * (w.numel() - 1) for w in windows)
    quality = evaluate(built(folder, split), split, 64, 1)
    assert quality.perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-6)
    assert quality.bits_per_byte is not None


def test_the_final_model_has_the_tokenizer_whole(chat_model, data, tmp_path):
    split = open_split(data / "tokens", "validation")
    model = built(chat_model, split)
    save_model(model, model.state_dict(), data / "tokenizer.json", tmp_path / "final_model")
    before, after = map(AutoTokenizer.from_pretrained, (chat_model, tmp_path / "final_model"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(after, name) == getattr(before, name), name
    assert after("some words")["input_ids"] == before("some words")["input_ids"]
    ids = [
        json.loads((folder / "config.json").read_text())
        for folder in (chat_model, tmp_path / "final_model")
    ]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ids[1][name] == ids[0][name], name
