"""Files laid out as wikitext, C4, FineWeb and TinyStories publish them, and plain text."""

import bz2
import gzip
import json
import random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.data import text_files
from shardlab.data.corpus_file import Document, read_corpus
from shardlab.data.limits import LARGEST
from shardlab.data.shards import is_validation
from shardlab.data.source_records import Tally
from shardlab.data.sources import prepare
from shardlab.data.text_files import read_text

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

STORIES = ["Once upon a time.\n\nThere was a fox.", "One day, a girl."]


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def read(tmp_path, source, path, **options):
    """What the two lines of params.yaml give, and the tally."""
    section = {"source": source, "path": str(path), **options}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"data": section}))
    data = Parameters(tmp_path / "params.yaml")("data")
    summary = prepare(data, tmp_path / "corpus.json", tmp_path / "work")
    return [line.document for line in read_corpus(tmp_path / "corpus.json")], summary


def untitled(name, texts):
    return [Document(f"{name}{number}", "", text) for number, text in texts]


WIKITEXT = ["", " = Robert = \n", "", " He is an actor . \n"]


@pytest.mark.parametrize("saved", [True, False])
def test_wikitext_whose_rows_are_lines_in_three_splits(tmp_path, saved):
    folder = tmp_path / "wikitext-2-raw-v1"
    rows = {split: [*WIKITEXT, f" {split} \n"] for split in ("test", "train", "validation")}
    if saved:
        tables = {split: datasets.Dataset.from_dict({"text": rows[split]}) for split in rows}
        datasets.DatasetDict(tables).save_to_disk(folder)
    else:
        for split in rows:
            parquet(folder / f"{split}-00000-of-00001.parquet", text=rows[split])
    prefix = "" if saved else "train-00000-of-00001.parquet:"
    documents, summary = read(tmp_path, "huggingface", folder)
    expected = [(2, WIKITEXT[1]), (4, WIKITEXT[3]), (5, " train \n")]
    assert documents == untitled(prefix, expected)
    assert summary["bad_records"]["count"] == 0 and summary["left_out"] == {"empty text": 2}
    documents, summary = read(tmp_path, "huggingface", folder, split="test")
    assert documents[-1].text == " test \n"
    assert summary["name"] == f"huggingface: {folder} (test)"
    with pytest.raises(UserError, match=r"no split 'dev'; set data\.split to test or train or val"):
        read(tmp_path, "huggingface", folder, split="dev")


def test_c4_in_packed_json_lines(tmp_path):
    folder = tmp_path / "en"
    folder.mkdir()
    for shard, text in enumerate(["Beginners BBQ Class.", "Discussion in Mac."]):
        row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
        lines = json.dumps(row) + "\n" + json.dumps(row | {"text": "Second."}) + "\n"
        with gzip.open(folder / f"c4-train.{shard:05d}-of-01024.json.gz", "wt") as file:
            file.write(lines)
    documents, _ = read(tmp_path, "huggingface", folder)
    names = [f"c4-train.{shard:05d}-of-01024.json.gz" for shard in range(2)]
    assert documents == [
        Document(f"{names[0]}:1", "", "Beginners BBQ Class."),
        Document(f"{names[0]}:2", "", "Second."),
        Document(f"{names[1]}:1", "", "Discussion in Mac."),
        Document(f"{names[1]}:2", "", "Second."),
    ]
    assert read(tmp_path, "jsonl", folder / names[0])[0] == [
        document._replace(id=document.id.partition(":")[2]) for document in documents[:2]
    ]
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-9])
    with pytest.raises(
        UserError, match=rf"{names[1]}: cannot be unpacked as \.gz .*fetch it again"
    ):
        read(tmp_path, "huggingface", folder)


def test_fineweb_with_ids_and_many_columns(tmp_path):
    folder = tmp_path / "fineweb"
    columns = {
        "text": ["A page.", "Another."],
        "id": ["<urn:uuid:1>", "<urn:uuid:2>"],
        "dump": ["CC-MAIN-2013-20"] * 2,
        "url": ["https://example.org"] * 2,
        "language_score": [0.9, 0.8],
        "token_count": [3, 2],
    }
    parquet(folder / "sample/10BT/000_00000.parquet", **columns)
    documents, _ = read(tmp_path, "huggingface", folder)
    assert documents == [
        Document("<urn:uuid:1>", "", "A page."),
        Document("<urn:uuid:2>", "", "Another."),
    ]


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".zst"])
def test_tinystories_in_plain_text(tmp_path, ending):
    path = tmp_path / f"TinyStories-train.txt{ending}"
    content = "".join(f"{story}\n<|endoftext|>\n" for story in STORIES).encode()
    pack = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
    }
    path.write_bytes(pack.get(ending, bytes)(content))
    documents, summary = read(tmp_path, "text", path)
    assert documents == untitled("", enumerate(STORIES, start=1))
    assert summary["left_out"] == {"empty text": 1}


def test_tinystories_in_parquet(tmp_path):
    parquet(tmp_path / "data/train-00000-of-00004-2d5a1467fff1081b.parquet", text=STORIES)
    documents, _ = read(tmp_path, "huggingface", tmp_path / "data")
    assert [document.text for document in documents] == STORIES


def test_other_columns_and_titles_that_have_to_be_there(tmp_path):
    parquet(tmp_path / "x.parquet", content=["a", "b", "c"], headline=["A", None, " "])
    options = {"text_column": "content", "bad_records": "skip"}
    assert len(read(tmp_path, "huggingface", tmp_path / "x.parquet", **options)[0]) == 3
    options["title_column"] = "headline"
    documents, summary = read(tmp_path, "huggingface", tmp_path / "x.parquet", **options)
    assert documents == [Document("1", "A", "a")]
    assert summary["bad_records"]["first"] == ["record 2: no headline", "record 3: empty headline"]
    with pytest.raises(UserError, match=r"no column 'body' \(it has content, headline\); set data"):
        read(tmp_path, "huggingface", tmp_path / "x.parquet", text_column="body")


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
    assert documents == [Document(name, "", text) for name, text in expected]
    assert summary["left_out"] == {"empty text": 1}
    (folder / "0.txt").write_text("a new file changes no other id")
    assert read(tmp_path, "text", folder)[0][1:] == documents


def test_documents_that_are_too_large_or_not_text_are_bad_records(tmp_path):
    path = tmp_path / "x.txt"
    large = b"word " * (LARGEST // 5 + 1)
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\n" + large + b"\n\n\xff\n\ntwo")
    options = {"separator": "\n\n", "bad_records": "skip"}
    documents, summary = read(tmp_path, "text", path, **options)
    assert documents == [Document("1", "", "one"), Document("4", "", "two")]
    assert summary["bad_records"]["first"] == [
        "document 2: larger than 16 MiB, or data.separator does not fit",
        "document 3: not UTF-8",
    ]


@given(
    st.lists(st.text("ab\n\r", max_size=9), max_size=9),
    st.sampled_from(["a", "aa", "aba", "\n", "\n\n"]),
    st.integers(1, 8),
)
def test_text_is_split_wherever_the_reads_end(tmp_path_factory, parts, separator, chunk):
    path = tmp_path_factory.mktemp("split") / "x.txt"
    path.write_bytes(separator.join(parts).encode())
    expected = path.read_bytes().decode().replace("\r\n", "\n").split(separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_CHUNK", chunk)
        found = [value["text"] for *_, value in read_text(path, separator, Tally("refuse", ""))]
    assert found == [text.strip() for text in expected]


def test_documents_without_titles_are_split_by_their_ids():
    draw = random.Random(0)
    ids = [f"part-{draw.randrange(10**9)}.txt:{number}" for number in range(4000)]
    keys = [Document(each, "", "same text").split_key for each in ids]
    assert 0.08 < sum(is_validation(key, 0.1) for key in keys) / len(keys) < 0.12
    assert Document("1", "T", "a").split_key == Document("2", "T", "b").split_key


@pytest.mark.parametrize(
    ("source", "path", "options", "message"),
    [
        (
            "huggingface",
            "absent/file.parquet",
            {},
            "no such file or folder, and no name on the hub",
        ),
        ("text", "absent", {}, "no such file or folder"),
        ("text", ".", {}, r"a folder without \.txt or \.md files; name files so, or give one file"),
        ("text", "x", {"split": "test"}, "split is for source huggingface: remove it"),
        ("json", "x", {"separator": "y"}, "separator is for source text: remove it"),
        ("huggingface", "params.yaml", {}, r"expected one of .* set data\.source to text"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, source, path, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, source, path, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_on_a_hub_out_of_reach_is_one_line_with_the_fix(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot load it from the hub") as caught:
        read(tmp_path, "huggingface", "Salesforce/wikitext:wikitext-2-v1", streaming=streaming)
    fix = "hf download Salesforce/wikitext --repo-type dataset --local-dir FOLDER"
    assert fix in str(caught.value) and "\n" not in str(caught.value)
