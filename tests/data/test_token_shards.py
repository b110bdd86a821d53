import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import CorpusDocument, read_corpus, write_corpus
from shardlab.data.settings import Tokenize
from shardlab.data.sources import generate
from shardlab.data.statistics import describe_tokens
from shardlab.data.tokenize import build_tokens, is_validation
from shardlab.data.tokenizer import load_tokenizer
from shardlab.data.tokens import open_split, read_manifest
from tests.token_data import write_tokens

SHARE = 0.2
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with corpus, tokenizer and three training shards; one document forges an end."""
    folder = tmp_path_factory.mktemp("built")
    forged = CorpusDocument("f", "forged", "one<|endoftext|>two " * 3)
    write_corpus(folder / "corpus.json", [forged, *generate(150)])
    options = Tokenize(tokenizer="train", vocabulary=400, shards=3)
    build_tokens(folder / "corpus.json", SHARE, options, folder / ".work", folder)
    return folder


@pytest.fixture
def tokens(built, tmp_path):
    """A copy of the shards that a test may damage."""
    for file in (built / "tokens").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def documents(folder, validation):
    every = read_corpus(folder / "corpus.json")
    return [d for d in every if is_validation(d.title, SHARE) == validation]


@pytest.mark.parametrize("name", ["train", "validation"])
def test_shards_join_to_the_tokens_of_the_documents_in_order(built, name):
    split = open_split(built / "tokens", name)
    tokenizer = load_tokenizer(built / "tokenizer.json")
    expected = documents(built, name == "validation")
    ids = tokenizer.encode([document.content for document in expected])
    joined = [i for part in ids for i in [*part, tokenizer.end_of_text_id]]
    assert split.read(0, len(split)).tolist() == joined
    assert split.documents == len(expected)
    assert split.text_bytes == sum(len(d.content.encode()) for d in expected)
    assert (split.vocabulary, split.end_of_text) == (400, tokenizer.end_of_text_id)


def test_any_range_is_read_across_shards(built):
    split = open_split(built / "tokens", "train")
    tokens = np.concatenate(list(split.arrays())).astype(np.int64)

    @given(st.data())
    def law(data):
        start = data.draw(st.integers(0, len(split)))
        count = data.draw(st.integers(0, len(split) - start))
        part = split.read(start, count)
        assert part.dtype == np.int64
        assert np.array_equal(part, tokens[start : start + count])

    law()
    for start, count in ((-1, 1), (0, len(split) + 1), (len(split), 1)):
        with pytest.raises(IndexError):
            split.read(start, count)


@pytest.mark.parametrize(("share", "fix"), [(1e-6, "raise it"), (1 - 1e-6, "lower it")])
def test_a_split_without_documents_is_refused_with_the_fix(tmp_path, share, fix):
    write_corpus(tmp_path / "corpus.json", generate(5))
    options = Tokenize(tokenizer="train", vocabulary=300, shards=1)
    with pytest.raises(UserError, match=rf"none of the 5 documents .*{fix}"):
        build_tokens(tmp_path / "corpus.json", share, options, tmp_path / ".work", tmp_path)
    assert not (tmp_path / "tokens").exists()


def test_large_vocabulary_uses_uint32(built, tmp_path):
    big = Tokenizer.from_file(str(built / "tokenizer.json"))
    big.add_tokens([f"<{i}>" for i in range(70_000)])
    big.save(str(tmp_path / "tokenizer.json"))
    options = Tokenize(tokenizer=str(tmp_path), vocabulary=None, shards=1)
    write_corpus(tmp_path / "corpus.json", [*generate(20), CorpusDocument("x", "t", "<69999>")])
    build_tokens(tmp_path / "corpus.json", SHARE, options, tmp_path / ".work", tmp_path)
    assert read_manifest(tmp_path / "tokens").dtype == "uint32"
    splits = [open_split(tmp_path / "tokens", name) for name in ("train", "validation")]
    assert max(split.read(0, len(split)).max() for split in splits) == 400 + 69_999


@pytest.mark.parametrize("template", ["$A", "end $A", "$A end"])
def test_the_end_stands_once_between_documents_and_lost_text_is_counted(tmp_path, template):
    """A tokenizer of words without one for `emu`, which may add its end before or after a text."""
    inner = Tokenizer(models.WordLevel({"?": 0, "end": 1, "a": 2, "gnu": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("end", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "end", "unk_token": "?"}')
    texts = ["a gnu", "a emu", "gnu"] * 30
    corpus = [CorpusDocument(str(number), "", text) for number, text in enumerate(texts)]
    write_corpus(tmp_path / "corpus.json", corpus)
    options = Tokenize(tokenizer=str(tmp_path), vocabulary=None, shards=1)
    build_tokens(tmp_path / "corpus.json", SHARE, options, tmp_path / ".work", tmp_path)
    split = open_split(tmp_path / "tokens", "validation")
    expected = [doc.text for doc in corpus if is_validation(doc.id, SHARE)]
    ids = {"a gnu": [2, 3], "a emu": [2, 0], "gnu": [3]}
    parts = [[1, *ids[text]] if template == "end $A" else [*ids[text], 1] for text in expected]
    assert split.read(0, len(split)).tolist() == [i for part in parts for i in part]
    assert split.altered == expected.count("a emu") > 0
    length = describe_tokens(open_split(tmp_path / "tokens", "train"), split)["length"]
    assert (length["max"], length["p50"]) == (3, 3)


def test_a_tokenizer_that_makes_ends_of_text_is_refused(built, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (tmp_path / "tokenizer.json").write_bytes((built / "tokenizer.json").read_bytes())
    options = Tokenize(tokenizer=str(tmp_path), vocabulary=None, shards=1)
    with pytest.raises(UserError, match="becomes the end-of-text token 'a'"):
        build_tokens(built / "corpus.json", SHARE, options, tmp_path / ".work", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("split", "file", "change", "message"),
    [
        ("train", "train-1.bin", lambda raw: raw[:-2], "damaged"),
        ("train", "train-1.bin", None, "damaged .it is missing"),
        ("train", "train-0.bin", lambda raw: bytes([raw[0] ^ 1]) + raw[1:], "damaged"),
        ("validation", "validation.bin", lambda raw: raw[:-1] + b"?", "damaged"),
        ("train", "manifest.json", None, ""),
        ("train", "manifest.json", lambda raw: b"{", ""),
        ("train", "manifest.json", lambda raw: b'{"dtype": "int8"}', ""),
    ],
)
def test_damage_is_refused_by_name_with_the_fix(tokens, split, file, change, message):
    raw = (tokens / file).read_bytes()
    (tokens / file).unlink()
    if change is not None:
        (tokens / file).write_bytes(change(raw))
    with pytest.raises(UserError, match=rf"{file}.*{message}.*shardlab tokenize"):
        open_split(tokens, split)


def test_tokens_beyond_the_vocabulary_are_refused_also_with_their_checksum(tmp_path):
    write_tokens(tmp_path, [np.full(100, 0xFFFF)], vocabulary=400)
    with pytest.raises(UserError, match=r"train-0\.bin: damaged \(token 65535 of 400\)"):
        open_split(tmp_path, "train")


def test_validation_share_is_met_and_stable_between_versions():
    chosen = [i for i in range(20000) if is_validation(f"title {i}", 0.02)]
    assert 340 < len(chosen) < 460  # three standard deviations
    assert chosen[:5] == [21, 130, 145, 195, 339]
