from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus
from shardlab.data.settings import Data
from shardlab.data.sources import prepare
from shardlab.data.tokenizer import pretrained_tokenizer
from shardlab.data.wheels import fetch

WORK = Path(__file__).parents[2] / ".work"

pytestmark = pytest.mark.long


def test_the_default_corpus_is_real_wikipedia_text(tmp_path):
    path = tmp_path / "corpus.json"
    source = prepare(Data(), path, WORK)
    assert source["documents"] == 10_084
    assert source["bad_records"]["count"] == 0
    assert source["left_out"] == {
        "redirect": 100,
        "shorter than 100 characters": 55,
        "number in a template": 794,
    }
    assert "CC BY-SA" in source["licence"]
    documents = list(read_corpus(path))
    assert sum(len(document.text.encode()) for document in documents) == 7_691_176
    assert len({document.id for document in documents}) == 10_084
    articles = {d.title: d.text for d in documents if d.id.startswith("article-")}
    assert len(articles) == 106
    assert articles["Albedo"].startswith("Albedo or reflection coefficient")


def test_gpt2_is_the_original_tokenizer():
    tokenizer = pretrained_tokenizer("gpt2", WORK)
    assert tokenizer.encode(["Hello world"]) == [[15496, 995]]
    assert (tokenizer.vocabulary, tokenizer.end_of_text_id) == (50_257, 50_256)
    assert tokenizer.end_of_text_id not in tokenizer.encode(["a<|endoftext|>b"])[0]


def test_a_failed_download_is_one_line_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"gensim==4\.4\.0.*connect this machine") as caught:
        fetch("gensim", tmp_path)
    assert "\n" not in str(caught.value)
    assert not any((tmp_path / "wheels").iterdir())
