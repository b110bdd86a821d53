"""Saved models load in transformers, whatever family and engine."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardlab.data.tokenizer import TextTokenizer
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.train.evaluation import load_model, save_model
from tests.ranks import run_ranks
from tests.whole_parameters import whole_parameters

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64},
    "llama": {**SMALL, **GROUPED},
    "qwen3": {**SMALL, **GROUPED},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = {"<end>": 0, **{f"word{i}": i for i in range(1, 64)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    TextTokenizer(inner, "<end>").save(path.parent)
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_model_of_every_engine(family, tied, tokenizer, tmp_path):
    config = CONFIG_MAPPING[family](**FAMILIES[family], tie_word_embeddings=tied)
    config.eos_token_id = config.bos_token_id = 0
    tokens = torch.arange(24).view(2, 12)

    def on_rank(group):
        result = {}
        for engine in ENGINES:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            trained = build_engine(
                model,
                parse_strategy({"engine": engine}),
                Optimization(),
                group,
            )
            trained.step([tokens], 1e-2)
            save_model(model, whole_parameters(trained), tokenizer, tmp_path / engine)
            model.eval()
            with torch.no_grad():
                result[engine] = trained.module(input_ids=tokens).logits
        return result

    logits = run_ranks(1, on_rank)[0]
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "new").stat().st_mode}, "others may read what the umask lets"
    for engine, expected in logits.items():
        loaded = load_model(tmp_path / engine)
        assert loaded.config.tie_word_embeddings == tied
        loaded.eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=tokens).logits, expected)
        names = AutoTokenizer.from_pretrained(tmp_path / engine)
        assert names.eos_token_id == loaded.config.eos_token_id
