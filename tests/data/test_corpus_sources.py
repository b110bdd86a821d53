import bz2
import json
import math
import multiprocessing
import sys
from collections import Counter
from itertools import pairwise

import pytest

from shardlab.config.model_and_data import Data
from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus
from shardlab.data.mediawiki import plain_text
from shardlab.data.sources import generate, prepare

RECORDS = [{"id": str(i), "title": f"Title {i}", "text": f"Text {i} é🦊"} for i in range(5)]


@pytest.fixture
def corpus(tmp_path):
    return tmp_path / "out" / "corpus.json"


def run(tmp_path, corpus, source, path=None, **options):
    data = Data(source=source, path=None if path is None else str(path), **options)
    summary = prepare(data, corpus, tmp_path / "work")
    return [line.document._asdict() for line in read_corpus(corpus)], summary


def write_json(tmp_path, records):
    path = tmp_path / "in.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def write_lines(tmp_path, lines):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_json_records_pass_unchanged(tmp_path, corpus):
    documents, summary = run(tmp_path, corpus, "json", write_json(tmp_path, RECORDS))
    assert documents == RECORDS
    assert json.loads(corpus.read_text(encoding="utf-8")) == RECORDS
    assert summary["documents"] == 5
    assert summary["bytes"] == sum(len(f"{r['title']}\n{r['text']}".encode()) for r in RECORDS)


def test_json_lines_pass_unchanged(tmp_path, corpus):
    path = write_lines(tmp_path, [json.dumps(r, ensure_ascii=False).encode() for r in RECORDS])
    assert run(tmp_path, corpus, "jsonl", path)[0] == RECORDS


def test_bad_line_is_reported_by_line_and_byte(tmp_path, corpus):
    good = json.dumps(RECORDS[0], ensure_ascii=False).encode()
    path = write_lines(tmp_path, [good, b'{"title": ?'])
    with pytest.raises(UserError, match=f"line 2, byte {len(good) + 11}: not JSON"):
        run(tmp_path, corpus, "jsonl", path)
    assert not corpus.exists()


def test_a_truncated_json_keeps_the_old_corpus(tmp_path, corpus):
    path = write_json(tmp_path, RECORDS)
    run(tmp_path, corpus, "json", path)
    old = corpus.read_bytes()
    path.write_bytes(path.read_bytes()[:-20])
    for policy in ("refuse", "skip"):
        with pytest.raises(UserError, match=f"record 5, byte {path.stat().st_size}"):
            run(tmp_path, corpus, "json", path, bad_records=policy)
    assert corpus.read_bytes() == old
    assert [p.name for p in corpus.parent.iterdir()] == ["corpus.json"]


def test_documents_limits_the_corpus(tmp_path, corpus):
    path = write_json(tmp_path, RECORDS)
    assert run(tmp_path, corpus, "json", path, documents=2)[0] == RECORDS[:2]


def test_an_absent_id_becomes_the_record_number(tmp_path, corpus):
    path = write_json(tmp_path, [{"title": "a", "text": "b"}, {"id": 9, "title": "a", "text": "b"}])
    assert [d["id"] for d in run(tmp_path, corpus, "json", path)[0]] == ["1", "9"]


@pytest.mark.parametrize(("source", "path"), [("json", "absent.json"), ("jsonl", ".")])
def test_an_absent_file_is_named(tmp_path, corpus, source, path):
    with pytest.raises(UserError, match="no such file"):
        run(tmp_path, corpus, source, path)


def test_no_documents_is_an_error(tmp_path, corpus):
    with pytest.raises(UserError, match="no documents"):
        run(tmp_path, corpus, "json", write_json(tmp_path, []))


def page(number, title, body, namespace=0, redirect=""):
    return (
        f"<page><title>{title}</title><ns>{namespace}</ns><id>{number}</id>{redirect}"
        f"<revision><id>1</id><timestamp>2020-01-01T00:00:00Z</timestamp>"
        f"<text>{body}</text></revision></page>"
    )


DUMP = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10">'
    "<siteinfo><sitename>W</sitename></siteinfo>"
    + page(1, "Alpha", "'''Alpha''' is [[letter|a letter]].\n\n== References ==\nbook")
    + page(2, "Talk:Alpha", "chat", namespace=1)
    + page(3, "A", "#REDIRECT [[Alpha]]", redirect='<redirect title="Alpha" />')
    + page(4, "Void", "{{only|a template}}")
    + page(5, "Beta", "Beta is next.")
    + "</mediawiki>"
)


@pytest.mark.parametrize("suffix", [".xml", ".xml.bz2"])
def test_articles_of_a_dump_are_read_in_order(tmp_path, corpus, suffix):
    path = tmp_path / f"dump{suffix}"
    path.write_bytes(bz2.compress(DUMP.encode()) if suffix == ".xml.bz2" else DUMP.encode())
    documents, summary = run(tmp_path, corpus, "mediawiki", path, bad_records="skip")
    assert [tuple(d.values()) for d in documents] == [
        ("1", "Alpha", "Alpha is a letter."),
        ("5", "Beta", "Beta is next."),
    ]
    assert summary["bad_records"]["first"] == ["page 4 ('Void'): empty text"]
    assert summary["left_out"] == {"not in the article namespace": 1, "redirect": 1}


def test_partially_read_dump_leaves_no_worker_process(tmp_path, corpus):
    path = tmp_path / "dump.xml"
    path.write_text(DUMP)
    before = set(multiprocessing.active_children())  # ranks that other tests keep
    assert len(run(tmp_path, corpus, "mediawiki", path, documents=1)[0]) == 1
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("packed", [True, False])
def test_a_truncated_dump_is_refused_by_page(tmp_path, corpus, packed):
    path = tmp_path / ("dump.xml.bz2" if packed else "dump.xml")
    whole = bz2.compress(DUMP.encode()) if packed else DUMP.encode()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"page \d+: not a whole MediaWiki dump"):
        run(tmp_path, corpus, "mediawiki", path)
    assert not corpus.exists()


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "folder", "saved"])
def test_a_local_dataset_needs_no_network(tmp_path, corpus, kind):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(RECORDS)
    folder = tmp_path / "dataset"
    folder.mkdir()
    if kind == "saved":
        path = folder / "saved"
        table.save_to_disk(path)
    elif kind == "json":
        path = folder / "rows.json"
        path.write_text(json.dumps(RECORDS), encoding="utf-8")
    elif kind == "jsonl":
        path = folder / "rows.jsonl"
        table.to_json(path)
    else:
        table.to_parquet(folder / "train.parquet")
        path = folder if kind == "folder" else folder / "train.parquet"
    assert run(tmp_path, corpus, "huggingface", path)[0] == RECORDS


def test_missing_datasets_package_is_reported_with_the_fix(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'shardlab\[datasets\]'"):
        run(tmp_path, corpus, "huggingface", "some/name")


def test_synthetic_text_is_reproducible_and_seeded():
    assert list(generate(20)) == list(generate(20))
    assert list(generate(20)) == list(generate(30))[:20]
    assert list(generate(20, seed=1)) != list(generate(20))
    assert len({document.title for document in generate(500)}) == 500


def test_synthetic_words_can_be_predicted_from_the_word_before():
    words = " ".join(document.text.lower() for document in generate(400)).split()

    def entropy(counts):
        total = sum(counts.values())
        return -sum(n / total * math.log2(n / total) for n in counts.values())

    pairs = entropy(Counter(pairwise(words)))
    assert pairs - entropy(Counter(words)) < entropy(Counter(words)) - 2


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and [[Target|shown]] and [[plain]]", "Bold and shown and plain"),
        ("Cat ({{IPA|k}}) sits.{{cite}}", "Cat sits."),
        ("One.<ref>a book</ref> Two.", "One. Two."),
        ("[[File:a.jpg|thumb|with [[link]]]]Text", "Text"),
        ("''[[Image:a.jpg|thumb|x]]slanted''", "slanted"),
        ("Text\n[[Category:Things]]\n[[de:Sache]]", "Text"),
        ("Before\n{|\n| cell\n|}\nAfter", "Before\n\nAfter"),
        ("[http://example.org a site] &amp; more", "a site & more"),
    ],
)
def test_markup_becomes_prose(markup, text):
    assert plain_text(markup) == text


def test_an_appendix_ends_at_the_next_section_of_its_level():
    text = plain_text("Lead\n== Notes ==\nn1\n=== Old ===\nn2\n== Life ==\nlived\n==See also==\nx")
    assert "lived" in text
    assert not any(word in text for word in ("n1", "n2", "Old", "x", "Notes"))
