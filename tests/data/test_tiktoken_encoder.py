import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from shardlab.core.files import write_text
from shardlab.data.corpus_file import write_corpus
from shardlab.data.shards import Job, Piece, build_shard
from shardlab.data.sources import generate
from shardlab.data.tiktoken_encoder import tiktoken_encoder
from shardlab.data.tokenizer import TextTokenizer, train_tokenizer
from tests.data.test_text_tokenizer import PIECES, fuzzed_texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MIXED = st.lists(TEXT | st.sampled_from(PIECES)).map("".join)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(fuzzed_texts(200)), 600)


@given(st.lists(MIXED, max_size=3))
def test_tiktoken_gives_the_ids_of_tokenizers(trained, texts):
    encode = trained.bulk_encoder()
    assert encode != trained.encode
    assert encode(texts) == trained.encode(texts)


def byte_level(pairs, **options):
    """A byte-level BPE whose ids rise with its merges."""
    words = dict.fromkeys([*ALPHABET, *(first + second for first, second in pairs)])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.long
def test_every_character_is_split_from_its_neighbours_in_the_same_places():
    # "a", "1", "!" and white space merge with any byte of the same piece, and nothing else merges
    tokenizer = byte_level([(c, byte) for c in "a1!Ġ" for byte in ALPHABET])
    encode = tiktoken_encoder(tokenizer)
    for start in range(0, 0x40000, 4096):
        codes = [code for code in range(start, start + 4096) if not 0xD800 <= code < 0xE000]
        text = "".join(f"a{c}1{c}!{c} {c}'{c}s" for c in map(chr, codes))
        assert encode(text) == ids(tokenizer, text)


def test_a_vocabulary_is_refused_or_has_equal_ids():
    """Vocabularies of random merges, of which tokenizers cannot reach all."""
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        words, pairs = list("abc"), {}
        for _ in range(draw.randrange(1, 9)):
            pair = (draw.choice(words), draw.choice(words))
            pairs[pair] = None
            words.append("".join(pair))
        tokenizer = byte_level(list(pairs))
        encode = tiktoken_encoder(tokenizer)
        refused += encode is None
        for _ in range(30 if encode else 0):
            text = "".join(draw.choices("abc", k=draw.randrange(12)))
            assert encode(text) == ids(tokenizer, text)
    assert 20 < refused < 180


def test_a_pair_that_is_a_token_but_no_merge_stays_a_pair():
    tokenizer = byte_level([("b", "c"), ("a", "b"), ("ab", "c")])
    assert len(ids(tokenizer, "abc")) == 2  # tiktoken would merge a and bc
    assert tiktoken_encoder(tokenizer) is None
    text = TextTokenizer(tokenizer)
    assert text.bulk_encoder() == text.encode


OTHERS = {
    "normalizer": lambda t: setattr(t, "normalizer", normalizers.NFC()),
    "no split": lambda t: setattr(
        t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "space before": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel()),
    "no pre-tokenizer": lambda t: setattr(t, "pre_tokenizer", None),
    "added token": lambda t: t.add_tokens([AddedToken("word")]),
    "dropout": lambda t: setattr(t.model, "dropout", 0.5),
    "whole words": lambda t: setattr(t.model, "ignore_merges", True),
    "prefix": lambda t: setattr(t.model, "continuing_subword_prefix", "#"),
    "suffix": lambda t: setattr(t.model, "end_of_word_suffix", "#"),
    "order": lambda t: setattr(t, "model", _disordered()),
    "missing byte": lambda t: setattr(t, "model", models.BPE({"a": 0}, [], unk_token="a")),
    "one id twice": lambda t: setattr(t, "model", _doubled()),
    "other model": lambda t: setattr(t, "model", models.WordLevel({"a": 0}, "a")),
}


def _disordered():
    words = [*ALPHABET, "bc", "ab"]
    return models.BPE({word: i for i, word in enumerate(words)}, [("a", "b"), ("b", "c")])


def _doubled():
    return models.BPE({word: max(i, 1) for i, word in enumerate(ALPHABET)}, [])


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tokenizers_are_left_to_their_library(kind):
    tokenizer = byte_level([("a", "b")])
    assert tiktoken_encoder(tokenizer)
    OTHERS[kind](tokenizer)
    assert tiktoken_encoder(tokenizer) is None


def test_shards_are_the_same_bytes(trained, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.json"
    write_corpus(corpus, generate(300))
    write_text(tmp_path / "tokenizer.json", trained.to_json())

    def shard(folder):
        job = Job(corpus, 0.1, tmp_path / "tokenizer.json", "<|endoftext|>", "uint16", folder)
        whole = np.array([[0, corpus.stat().st_size]])
        build_shard(job, Piece("train-0", whole, validation=False))
        return [path.read_bytes() for path in sorted(folder.iterdir())]

    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    fast = shard(tmp_path / "fast")
    monkeypatch.setattr(TextTokenizer, "bulk_encoder", lambda self: self.encode)
    assert shard(tmp_path / "slow") == fast
