import json
import os
import subprocess
import sys
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.data.settings import Tokenize
from shardlab.data.sources import generate
from shardlab.data.tokenizer import load_tokenizer, pretrained_tokenizer, train_tokenizer
from shardlab.models.settings import Model

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PIECES = ["word", "'s", "'", " ", "  ", "\n", "\t", "\r\n", "9", "12", "!", "...", "é", "\u0301"]
PIECES += ["語", "🦊", "\u00a0", "\u2003", "\x1c", "\x85", "<|endoftext|>", "ab", "\u200d", "İ"]
MIXED = st.lists(TEXT | st.sampled_from(PIECES), max_size=30).map("".join)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
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


@given(st.lists(MIXED, max_size=5))
def test_tokens_decode_to_the_text_without_special_tokens(tokenizer, texts):
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text_id not in ids
        assert all(0 <= i < tokenizer.vocabulary for i in ids)


@pytest.mark.long
def test_training_does_not_depend_on_threads(tokenizer):
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", TRAIN]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == tokenizer.sha256


@pytest.mark.long
def test_training_ends_where_distinct_words_are_too_many(capsys):
    numbers = (f"{n:06d}" for n in count())
    endless = train_tokenizer(numbers, 300)
    assert "trained on the first 2.1 million characters" in capsys.readouterr().err
    first = islice((f"{n:06d}" for n in count()), (1 << 21) // 6)
    assert endless.to_json() == train_tokenizer(first, 300).to_json()


def test_transformers_loads_the_file(tokenizer, saved):
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(saved), eos_token="<|endoftext|>")
    text = "Some words, é🦊."
    assert loaded(text)["input_ids"] == tokenizer.encode([text])[0]
    assert loaded.eos_token_id == tokenizer.end_of_text_id
    assert len(loaded) == tokenizer.vocabulary


def test_a_saved_tokenizer_is_the_same_again(tokenizer, saved, tmp_path):
    assert tokenizer.vocabulary == 400
    for again in (load_tokenizer(saved), pretrained_tokenizer(str(saved.parent), tmp_path)):
        assert again.sha256 == tokenizer.sha256
        assert again.encode(["x<|endoftext|>"]) == tokenizer.encode(["x<|endoftext|>"])


@pytest.mark.parametrize("end", [None, "</s>", {"content": "</s>"}])
def test_a_given_tokenizer_gets_an_end_and_loses_padding_and_truncation(tmp_path, end):
    inner = Tokenizer(models.BPE({byte: number for number, byte in enumerate(ALPHABET)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.enable_truncation(4)
    inner.enable_padding(length=10)
    inner.save(str(tmp_path / "tokenizer.json"))
    if end is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    opened = pretrained_tokenizer(str(tmp_path), tmp_path)
    assert opened.end_of_text == ("</s>" if end else "<|endoftext|>")
    assert (opened.end_of_text_id, opened.vocabulary) == (256, 257)
    assert [len(ids) for ids in opened.encode(["a", "abcdefgh"])] == [1, 8]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", {"eos_token": {"content": "!"}}),
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": [0, 1]}),
    ],
)
def test_the_end_is_found_where_hugging_face_looks(tmp_path, name, content):
    inner = Tokenizer(models.BPE({byte: number for number, byte in enumerate(ALPHABET)}, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no token that ends a document: set eos_token in"):
        pretrained_tokenizer(str(tmp_path), tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    opened = pretrained_tokenizer(str(tmp_path), tmp_path)
    assert (opened.end_of_text, opened.end_of_text_id) == ("!", 0)


def test_an_invalid_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"there is no absent\.json; give .*save_pretrained"):
        pretrained_tokenizer("absent.json", tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {}}')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a file of the tokenizers library"):
        pretrained_tokenizer(str(path), tmp_path)


def test_a_name_on_the_hub_is_read_from_the_cache_or_is_one_line(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match="cannot be fetched from the hub") as caught:
        pretrained_tokenizer("Qwen/Qwen2.5-0.5B", tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    folder = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B"
    write_text(folder / "refs/main", "0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    write_text(snapshot / "tokenizer.json", tokenizer.to_json())
    write_text(snapshot / "tokenizer_config.json", '{"eos_token": "<|im_end|>"}')
    opened = pretrained_tokenizer("Qwen/Qwen2.5-0.5B", tmp_path)
    assert opened.end_of_text == "<|im_end|>"
    assert opened.encode(["some words"]) == tokenizer.encode(["some words"])


def test_the_default_is_the_tokenizer_of_a_pretrained_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("train", "gpt2"):
        (tmp_path / word).mkdir()
        assert Tokenize().for_model(word).tokenizer == f"./{word}"
    of_model = Tokenize().for_model("models/llama")
    assert (of_model.tokenizer, of_model.vocabulary) == ("models/llama", None)
    for model in (Model(preset="tiny"), Model(config="models/llama")):
        trained = Tokenize().for_model(model.pretrained)
        assert (trained.tokenizer, trained.vocabulary) == ("train", 2048)
    named = Tokenize(tokenizer="gpt2").for_model("models/llama")
    assert (named.tokenizer, named.vocabulary) == ("gpt2", None)
    with pytest.raises(UserError, match="has its own tokenizer: remove it, or set"):
        Tokenize(vocabulary=300).for_model("models/llama")
