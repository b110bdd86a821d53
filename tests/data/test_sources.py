"""Text of every source: as files are laid out by their publishers, and what is a bad record."""

import bz2
import gzip
import json
import sys
from collections import Counter

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.data.corpus_file import CorpusDocument, read_corpus
from shardlab.data.local_files import read_text
from shardlab.data.source_records import LARGEST, RecordCounts
from shardlab.data.sources import generate, prepare

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

RECORDS = [{"id": str(i), "title": f"Title {i}", "text": f"Text {i} é🦊"} for i in range(5)]
STORIES = ["Once upon a time.\n\nThere was a fox.", "One day, a girl."]
BAD = {
    '{"title": "a", "text": "b", "id": "%s"}' % ("x" * 1001): "id longer than 1000 characters",
    "[]": "not an object",
    '{"title": "a"}': "no text",
    '{"title": "a", "text": " "}': "empty text",
    '{"text": 3}': "text is not text",
}
_LINES = '{"text": "one"}\n{"text": %s}\n{"text": "two"}'
_PAGE = "<page><title>x</title><revision><text>{}</text></revision></page>"
_DUMP = f"<mediawiki>{''.join(map(_PAGE.format, ['one', '', 'two']))}</mediawiki>"
EXAMPLES = {
    "text": ("one<|endoftext|>\xff<|endoftext|>two", "not UTF-8"),
    "json": (f"[{','.join((_LINES % 3).splitlines())}]", "text is not text"),
    "jsonl": (_LINES % 3, "text is not text"),
    "huggingface": (_LINES % '" ", "title": "x"', "empty text"),
    "mediawiki": (_DUMP, "no text"),
}
"""Sources that read files: two documents around a bad record, and the kind of bad record."""


def read(tmp_path, source, path, **options):
    """Return the documents and the summary of a source in params.yaml."""
    section = {"source": source, "path": str(path), **options}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"data": section}))
    data = Parameters(tmp_path / "params.yaml")("data")
    summary = prepare(data, tmp_path / "corpus.json", tmp_path / "work")
    return list(read_corpus(tmp_path / "corpus.json")), summary


def untitled(texts):
    return [CorpusDocument(str(number), "", text) for number, text in texts]


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)


@pytest.mark.parametrize("kind", ["array", "lines", "parquet", "rows", "folder", "saved"])
def test_records_pass_unchanged(tmp_path, kind):
    lines = "\n".join(map(json.dumps, RECORDS))
    table = datasets.Dataset.from_list(RECORDS)
    source, path = "huggingface", tmp_path / "in"
    if kind == "saved":
        table.save_to_disk(path)
    elif kind in ("array", "lines"):
        source = {"array": "json", "lines": "jsonl"}[kind]
        path.write_text(json.dumps(RECORDS) if kind == "array" else lines)
    elif kind == "rows":
        path = tmp_path / "in.jsonl"
        path.write_text(lines)
    else:
        parquet(path / "train.parquet", **table.to_dict())
        path = path / "train.parquet" if kind == "parquet" else path
    documents, summary = read(tmp_path, source, path)
    assert [document._asdict() for document in documents] == RECORDS
    assert summary["documents"] == 5
    assert summary["bytes"] == sum(len(f"{r['title']}\n{r['text']}".encode()) for r in RECORDS)
    assert read(tmp_path, source, path, documents=2)[0] == documents[:2]


@pytest.mark.parametrize("source", EXAMPLES)
def test_a_bad_record_of_any_source_is_counted_and_named_or_refused(tmp_path, source):
    content, kind = EXAMPLES[source]
    path = tmp_path / ("in.jsonl" if source == "huggingface" else "in")
    path.write_bytes(content.encode("latin-1"))
    documents, summary = read(tmp_path, source, path, bad_records="skip")
    assert [document.text for document in documents] == ["one", "two"]
    assert [*summary["bad_records"]["kinds"].values()] == [1]
    with pytest.raises(UserError, match=rf"{kind}.*set data\.bad_records to skip") as caught:
        read(tmp_path, source, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["json", "jsonl"])
def test_bad_records_are_counted_and_named_or_refused(tmp_path, source):
    good = '{"text": "good"}'
    records = [good, *BAD, good, '{"id": 9, "text": "%s"}' % ("x" * (LARGEST + 1))]
    content = f"[{','.join(records)}]" if source == "json" else "\n".join(records)
    (tmp_path / "in").write_text(content)
    documents, summary = read(tmp_path, source, tmp_path / "in", bad_records="skip")
    assert documents == untitled([(1, "good"), (len(BAD) + 2, "good")])
    kinds = [*BAD.values(), "larger than 16 MiB"]
    assert summary["bad_records"]["count"] == len(kinds)
    assert summary["bad_records"]["kinds"] == dict(Counter(kinds))
    for named, kind in zip(summary["bad_records"]["first"], kinds, strict=True):
        assert named.endswith(f": {kind}")
    before = (tmp_path / "corpus.json").read_bytes()
    with pytest.raises(UserError, match=r"2: id longer .*set data\.bad_records to skip") as caught:
        read(tmp_path, source, tmp_path / "in")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "corpus.json").read_bytes() == before


def test_fields_that_nobody_asked_for_refuse_no_text(tmp_path):
    """As json.dumps and pandas write them: NaN, whole numbers with a fraction, lists."""
    lines = [
        '{"id": 7.0, "title": 7, "text": "a", "score": NaN}',
        '{"id": 1.5, "title": ["x"], "text": "b", "score": -Infinity}',
        '{"id": {}, "title": " ", "text": "c"}',
    ]
    expected = [
        CorpusDocument("7", "7", "a"),
        CorpusDocument("1.5", "", "b"),
        CorpusDocument("3", "", "c"),
    ]
    (tmp_path / "in").write_text("\n".join(lines))
    assert read(tmp_path, "jsonl", tmp_path / "in")[0] == expected
    with pytest.raises(UserError, match="line 2: title is not text"):
        read(tmp_path, "jsonl", tmp_path / "in", title_column="title")
    array = f"[{','.join(lines)}]".replace("NaN", "0").replace("-Infinity", "0")
    (tmp_path / "in").write_text(array)
    assert read(tmp_path, "json", tmp_path / "in")[0] == expected


@pytest.mark.parametrize("saved", [True, False])
def test_wikitext_whose_rows_are_lines_in_three_splits(tmp_path, saved):
    folder, lines = tmp_path / "wikitext-2-raw-v1", ["", " = Robert = \n", "", " He acts . \n"]
    rows = {split: [*lines, f" {split} \n"] for split in ("test", "train", "validation")}
    if saved:
        tables = {split: datasets.Dataset.from_dict({"text": rows[split]}) for split in rows}
        datasets.DatasetDict(tables).save_to_disk(folder)
    else:
        for split in rows:
            parquet(folder / f"{split}-00000-of-00001.parquet", text=rows[split])
    documents, summary = read(tmp_path, "huggingface", folder)
    assert documents == untitled([(2, lines[1]), (4, lines[3]), (5, " train \n")])
    assert summary["bad_records"]["count"] == 0 and summary["left_out"] == {"empty text": 2}
    documents, summary = read(tmp_path, "huggingface", folder, split="test")
    assert documents[-1].text == " test \n"
    assert summary["name"] == f"huggingface: {folder} (test)"
    with pytest.raises(UserError, match=r"dev.*check data\.split and files"):
        read(tmp_path, "huggingface", folder, split="dev")


def test_c4_in_packed_json_lines(tmp_path):
    (tmp_path / "en").mkdir()
    for shard in range(2):
        lines = [json.dumps({"text": f"{shard} {n}", "url": "https://a.org"}) for n in (1, 2)]
        path = tmp_path / f"en/c4-train.{shard:05d}-of-01024.json.gz"
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    documents, _ = read(tmp_path, "huggingface", tmp_path / "en")
    assert documents == untitled(enumerate(["0 1", "0 2", "1 1", "1 2"], start=1))


@pytest.mark.parametrize("name", ["csv", "csv/data.csv"])
def test_csv_stays_text_also_in_a_folder_named_like_a_loader(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("csv", "other"):
        (tmp_path / folder).mkdir()
    texts = ["null", "NA", "None", "nan", "10", "007", "two\nlines, and a comma"]
    rows = "".join(f'"{text}",{number}\n' for number, text in enumerate(texts, start=1))
    (tmp_path / "csv/data.csv").write_text(f"text,id\n{rows}")
    (tmp_path / "other/b.csv").write_text("text,id\nnot mine,1\n")
    assert read(tmp_path, "huggingface", name)[0] == untitled(enumerate(texts, start=1))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_tinystories_in_plain_text(tmp_path, suffix):
    path = tmp_path / f"TinyStories-train.txt{suffix}"
    content = "".join(f"{story}\n<|endoftext|>\n" for story in STORIES).encode()
    pack = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
    }
    path.write_bytes(pack.get(suffix, bytes)(content))
    documents, summary = read(tmp_path, "text", path)
    assert documents == untitled(enumerate(STORIES, start=1))
    assert summary["left_out"] == {"empty text": 1}


def test_columns_titles_and_rows_of_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    large = "x" * (LARGEST + 1)
    parquet(path, content=["a", "b", "c", large], headline=["A", None, " ", "D"])
    options = {"text_column": "content", "bad_records": "skip"}
    documents, summary = read(tmp_path, "huggingface", path, **options)
    assert documents == untitled([(1, "a"), (2, "b"), (3, "c")])
    assert summary["bad_records"]["first"] == ["record 4: larger than 16 MiB"]
    options["title_column"] = "headline"
    documents, summary = read(tmp_path, "huggingface", path, **options)
    assert documents == [CorpusDocument("1", "A", "a")]
    assert summary["bad_records"]["first"][0] == "record 2: no headline"
    assert summary["bad_records"]["kinds"]["empty headline"] == 1
    with pytest.raises(UserError, match=r"no column 'body' \(it has content, headline\); set data"):
        read(tmp_path, "huggingface", path, text_column="body")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"x\.parquet.* cannot read it as a Hugging") as caught:
        read(tmp_path, "huggingface", path, **options)
    assert "\n" not in str(caught.value)


def test_a_folder_of_texts_is_read_in_order_without_hidden_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b/.git").mkdir(parents=True)
    files = {"z.txt": "last", "a.md": "first", "b/c.txt": "", "b/d.txt.gz": "packed"}
    for name, text in files.items():
        raw = text.encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    for name in (".hidden.txt", "b/.git/x.txt", "program.py"):
        (folder / name).write_text("no document")
    documents, summary = read(tmp_path, "text", folder)
    expected = [("a.md:1", "first"), ("z.txt:1", "last"), ("b/d.txt.gz:1", "packed")]
    assert documents == [CorpusDocument(name, "", text) for name, text in expected]
    assert summary["left_out"] == {"empty text": 1}
    (folder / "0.txt").write_text("a new file changes no other id")
    assert read(tmp_path, "text", folder)[0][1:] == documents


def test_texts_that_are_too_large_or_not_utf8_are_bad_records(tmp_path):
    large = b"word " * (LARGEST // 4)
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\r\n" + large + b"\n\n\xff\n\ntwo")
    options = {"separator": "\n\n", "bad_records": "skip"}
    documents, summary = read(tmp_path, "text", path, **options)
    assert documents == [CorpusDocument("1", "", "one"), CorpusDocument("4", "", "two")]
    assert summary["bad_records"]["first"] == [
        "document 2: larger than 16 MiB, or data.separator does not fit",
        "document 3: not UTF-8, or half of a surrogate pair in the text",
    ]


@given(
    st.lists(st.text("ab\n", max_size=9), max_size=9),
    st.sampled_from(["a", "aa", "aba", "\n", "\n\n"]),
    st.integers(0, 3),
)
def test_text_is_split_wherever_reads_end(tmp_path_factory, parts, separator, before):
    """A read is of 262,144 characters: the text is moved over the end of the first."""
    path = tmp_path_factory.mktemp("split") / "x.txt"
    content = "x" * (262_144 - before) + separator.join(parts)
    path.write_text(content)
    texts = [value["text"] for *_, value in read_text(path, separator, RecordCounts("refuse", ""))]
    assert texts == [text.strip() for text in content.split(separator)]


@pytest.mark.parametrize(
    ("source", "path", "options", "message"),
    [
        ("huggingface", "absent/x.parquet", {}, "no such file or folder, and no name on the hub"),
        ("text", "absent", {}, "no such file or folder"),
        ("json", "absent", {}, "no such file"),
        ("jsonl", ".", {}, "a folder: join its files to one, or .* data.source to huggingface"),
        ("mediawiki", ".", {}, "a folder: give one file"),
        ("json", "empty", {}, "no documents"),
        (
            "jsonl",
            "body",
            {},
            r"no text; .*data\.text_column to one of its keys \(body, headline\)",
        ),
        (
            "jsonl",
            "body",
            {"bad_records": "skip"},
            r"body: no documents; bad records: 1, the first at line 1: no text; .*\(body, head",
        ),
        (
            "jsonl",
            "body",
            {"text_column": "body", "title_column": "heading"},
            r"no heading; .*data\.title_column to one of its keys \(body, headline\)",
        ),
        ("text", ".", {}, r"a folder without \.txt or \.md files: rename the files, or give one"),
        ("text", "x", {"split": "test"}, "split requires source huggingface or tokens: remove it"),
        ("huggingface", "params.yaml", {}, r"expected one of .* set data\.source to text"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, source, path, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("[]")
    (tmp_path / "body").write_text('{"body": "a", "headline": "b"}')
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, source, path, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_dataset_on_a_hub_out_of_reach_is_one_line_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot load it from the hub") as caught:
        read(tmp_path, "huggingface", "Salesforce/wikitext:wikitext-2-v1")
    fix = "hf download Salesforce/wikitext --repo-type dataset --local-dir FOLDER"
    assert fix in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'shardlab\[datasets\]'"):
        read(tmp_path, "huggingface", "some/name")


def test_synthetic_text_is_reproducible_and_seeded():
    assert list(generate(20)) == list(generate(30))[:20]
    assert list(generate(20, seed=1)) != list(generate(20))
    assert len({document.title for document in generate(500)}) == 500
