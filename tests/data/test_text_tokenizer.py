import json
import os
import random
import subprocess
import sys
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardlab.config.model_and_data import Model, Tokenize
from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.data import limits
from shardlab.data.sources import generate
from shardlab.data.tokenizer import (
    TextTokenizer,
    fingerprint,
    given_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TRAIN = """
from shardlab.data.sources import generate
from shardlab.data.tokenizer import train_tokenizer
print(train_tokenizer((d.content for d in generate(100)), 400).sha256)
"""


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((document.content for document in generate(100)), 400)


@pytest.fixture
def saved(tokenizer, tmp_path):
    write_text(tmp_path / "tokenizer.json", tokenizer.to_json())
    return tmp_path / "tokenizer.json"


@given(st.lists(TEXT | st.just("a<|endoftext|>b"), max_size=5))
def test_tokens_decode_to_the_text_without_special_tokens(tokenizer, texts):
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text_id not in ids
        assert all(0 <= i < tokenizer.vocabulary for i in ids)


def test_training_does_not_depend_on_threads(tokenizer):
    for threads in ("1", "3"):
        run = subprocess.run(
            [sys.executable, "-c", TRAIN],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == tokenizer.sha256


def test_the_vocabulary_has_the_size_asked_for(tokenizer):
    assert tokenizer.vocabulary == 400
    assert train_tokenizer(iter(["some text"]), 400).vocabulary == 257


def test_transformers_loads_the_file(tokenizer, saved):
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(saved), eos_token="<|endoftext|>")
    text = "Some words, é🦊."
    assert loaded(text)["input_ids"] == tokenizer.encode([text])[0]
    assert loaded.eos_token_id == tokenizer.end_of_text_id
    assert len(loaded) == tokenizer.vocabulary


def test_a_saved_tokenizer_is_the_same_again(tokenizer, saved, tmp_path):
    for again in (
        load_tokenizer(saved),
        *(given_tokenizer(str(p), tmp_path) for p in (saved, saved.parent)),
    ):
        assert again.sha256 == tokenizer.sha256
        assert again.encode(["x<|endoftext|>"]) == tokenizer.encode(["x<|endoftext|>"])


def plain(path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(path))


def test_a_given_tokenizer_gets_an_end_and_loses_padding_and_truncation(tmp_path):
    plain(tmp_path / "tokenizer.json")
    tokenizer = given_tokenizer(str(tmp_path), tmp_path)
    assert (tokenizer.end_of_text, tokenizer.end_of_text_id) == ("<|endoftext|>", 256)
    assert tokenizer.vocabulary == 257
    assert [len(ids) for ids in tokenizer.encode(["a", "abcdefgh"])] == [1, 8]


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>"}])
def test_a_configured_end_is_used(tmp_path, end):
    plain(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert given_tokenizer(str(tmp_path), tmp_path).end_of_text == "</s>"


def test_invalid_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"there is no absent\.json; give .*save_pretrained"):
        given_tokenizer("absent.json", tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {}}')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a file of the tokenizers library"):
        given_tokenizer(str(path), tmp_path)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of the hub without a network, in the layout of huggingface_hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_on_the_hub_is_read_from_the_cache(tokenizer, hub_cache, tmp_path):
    folder = hub_cache / "models--Qwen--Qwen2.5-0.5B"
    write_text(folder / "refs/main", "0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    write_text(snapshot / "tokenizer.json", tokenizer.to_json())
    write_text(snapshot / "tokenizer_config.json", '{"eos_token": "<|im_end|>"}')
    given = given_tokenizer("Qwen/Qwen2.5-0.5B", tmp_path)
    assert given.end_of_text == "<|im_end|>"
    assert given.encode(["some words"]) == tokenizer.encode(["some words"])
    before = fingerprint("Qwen/Qwen2.5-0.5B")
    write_text(snapshot / "tokenizer_config.json", '{"eos_token": "<|end|>"}')
    assert fingerprint("Qwen/Qwen2.5-0.5B") != before


def test_a_name_that_is_neither_cached_nor_in_reach_is_one_line(hub_cache, tmp_path):
    with pytest.raises(UserError, match="cannot be fetched from the hub") as caught:
        given_tokenizer("Qwen/Qwen2.5-0.5B", tmp_path)
    said = str(caught.value)
    assert said.startswith("tokenize.tokenizer 'Qwen/Qwen2.5-0.5B': there is no Qwen/Qwen2.5-0.5B")
    assert said.endswith("a folder that save_pretrained of a fast tokenizer wrote")
    assert "\n" not in said and len(said) < 500


def test_the_default_is_the_tokenizer_of_a_pretrained_model():
    own = Tokenize().for_model(Model(pretrained="models/llama"))
    assert (own.tokenizer, own.vocabulary) == ("models/llama", None)
    for model in (Model(preset="tiny"), Model(config="models/llama")):
        trained = Tokenize().for_model(model)
        assert (trained.tokenizer, trained.vocabulary) == ("train", 2048)
    given = Tokenize(tokenizer="gpt2").for_model(Model(pretrained="models/llama"))
    assert (given.tokenizer, given.vocabulary) == ("gpt2", None)
    with pytest.raises(UserError, match="brings its own tokenizer: remove it, or set"):
        Tokenize(vocabulary=300).for_model(Model(pretrained="models/llama"))


PIECES = ["word", "'s", "'", " ", "  ", "\n", "\t", "\r\n", "9", "12", "!", "...", "é", "\u0301"]
PIECES += ["語", "🦊", "\u00a0", "\u2003", "\x1c", "\x85", "<|endoftext|>", "ab", "\u200d", "İ"]


def fuzzed_texts(count):
    """Texts of many kinds of tokens and white space."""
    draw = random.Random(0)
    return ["".join(draw.choices(PIECES, k=400)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "whole text"])
def test_parts_have_the_tokens_of_the_whole(tokenizer, monkeypatch, kind):
    monkeypatch.setattr(limits, "PART", 50)
    tried = tokenizer
    if kind != "byte-level":
        inner = Tokenizer.from_str(tokenizer.to_json())
        inner.pre_tokenizer = pre_tokenizers.Metaspace(split=kind == "metaspace")
        if kind == "whole text":
            inner.normalizer = normalizers.Prepend("a")
        tried = TextTokenizer(inner)
    cuts = 0
    for text in fuzzed_texts(100):
        parts = list(tried.parts(text))
        cuts += len(parts) - 1
        assert "".join(parts) == text
        assert [i for ids in tried.encode(parts) for i in ids] == tried.encode([text])[0]
    assert (cuts > 0) == (kind != "whole text")


def test_training_in_parts_gives_the_same_tokenizer(monkeypatch):
    whole = train_tokenizer(iter(fuzzed_texts(50)), 400).to_json()
    monkeypatch.setattr(limits, "PART", 50)
    assert train_tokenizer(iter(fuzzed_texts(50)), 400).to_json() == whole


def test_a_text_that_cannot_be_cut_is_refused_in_one_line(tokenizer):
    with pytest.raises(UserError, match="changes its tokens where it is cut"):
        list(tokenizer.parts("x" * 1_200_000))


def test_training_ends_where_distinct_words_are_too_many(monkeypatch, capsys):
    monkeypatch.setattr(limits, "WORDS", 3000)
    endless = train_tokenizer((f"{n:06d}" for n in count()), 300)
    assert "first 0.003 million characters" in capsys.readouterr().err
    assert endless.to_json() == train_tokenizer((f"{n:06d}" for n in range(500)), 300).to_json()
    # words that come again cost nothing
    assert len([*limits.first_words(["the same words"] * 9000)]) == 9000


def test_the_words_that_are_counted_bound_what_training_keeps(monkeypatch):
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in fuzzed_texts(100):
        kept = {piece for piece, _ in pieces.pre_tokenize_str(text)}  # a character for each byte
        monkeypatch.setattr(limits, "WORDS", sum(map(len, kept)) - 1)
        assert [*limits.first_words([text])] == []
