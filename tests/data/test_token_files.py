"""Tokens of other programs: the same batches as from shards of this project, without a copy."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus, write_corpus
from shardlab.data.loader import Batches, blocks
from shardlab.data.mapped_tokens import map_tokens
from shardlab.data.settings import Data, Tokenize
from shardlab.data.sources import generate, prepare
from shardlab.data.statistics import describe_tokens
from shardlab.data.tokenize import build_tokens
from shardlab.data.tokenizer import load_tokenizer
from shardlab.data.tokens import open_split, read_manifest
from tests.foreign_tokens import (
    DOCUMENTS,
    GOLDEN,
    WRITERS,
    datatrove,
    flat,
    megatron,
    nanogpt,
    saved_dataset,
)

EXAMPLE = Path(__file__).parents[2] / "examples/datatrove_tokens.py"
NUMBERS = Tokenize(vocabulary=400, end_of_text=0)


@pytest.fixture(scope="module")
def shards_of_text(tmp_path_factory):
    """Tokens of a corpus in shards of this project."""
    folder = tmp_path_factory.mktemp("shards")
    write_corpus(folder / "corpus.json", generate(60))
    options = Tokenize(tokenizer="train", vocabulary=400, shards=2)
    build_tokens(folder / "corpus.json", 0.2, options, folder / ".work", folder)
    return folder


def splits(folder):
    return [open_split(folder / "tokens", name) for name in ("train", "validation")]


def documents(split):
    tokens = split.read(0, len(split))
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1)[:-1]]


def map_files(path, out, options=NUMBERS, share=0.34, **more):
    """Prepare and map tokens as the stages do; returns the lengths of training documents."""
    data = Data(source="tokens", path=str(path), validation_share=share, **more)
    source = prepare(data, out / "corpus.json", out / ".work")
    return map_tokens(data, options, source["files"], out / ".work", out)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_tokens_of_another_program_give_the_batches_of_own_shards(shards_of_text, tmp_path, write):
    train, validation = splits(shards_of_text)
    path = write(tmp_path, documents(train) + documents(validation))
    options = Tokenize(tokenizer=str(shards_of_text))
    share = validation.documents / (train.documents + validation.documents)
    lengths = map_files(path, tmp_path / "out", options, share)
    mapped, held_out = splits(tmp_path / "out")
    assert (mapped.documents, held_out.documents) == (train.documents, validation.documents)
    assert (mapped.vocabulary, mapped.end_of_text) == (train.vocabulary, train.end_of_text)
    assert mapped.tokenizer_sha256 == train.tokenizer_sha256
    expected_batches, batches = Batches(train, 32, seed=3), Batches(mapped, 32, seed=3)
    assert batches.samples_per_epoch == expected_batches.samples_per_epoch
    for first in range(0, 2 * expected_batches.samples_per_epoch, 7):
        assert batches.batch(first, 7).equal(expected_batches.batch(first, 7))
    pairs = zip(blocks(validation, 32, 4), blocks(held_out, 32, 4), strict=True)
    assert all(mine.equal(other) for mine, other in pairs)
    expected = describe_tokens(train, validation)
    statistics = describe_tokens(mapped, held_out, lengths)
    assert {key: statistics[key] for key in ("length", "entropy_bits", "vocabulary")} == {
        key: expected[key] for key in ("length", "entropy_bits", "vocabulary")
    }
    # the text is unknown
    assert statistics["train"]["bytes"] is statistics["train"]["bytes_per_token"] is None
    assert (mapped.text_bytes, [*read_corpus(tmp_path / "out/corpus.json")]) == (None, [])
    # no copy: what is written does not grow with the tokens
    assert [file.name for file in (tmp_path / "out/tokens").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("write", "written"),
    [(megatron, ["golden.bin", "golden.idx"]), (datatrove, ["golden.ds", "golden.ds.index"])],
)
def test_files_of_the_packages_are_as_the_layouts_say(tmp_path, write, written):
    """Bytes that Megatron and datatrove wrote."""
    path = write(tmp_path, DOCUMENTS)
    for name in written:
        mine = path.with_name(path.stem + name.removeprefix("golden"))
        assert mine.read_bytes() == (GOLDEN / name).read_bytes()
    map_files(GOLDEN / written[0], tmp_path / "out")
    train, validation = splits(tmp_path / "out")
    assert [*documents(train), *documents(validation)] == DOCUMENTS
    assert (train.documents, validation.documents) == (2, 1)


@pytest.mark.long
def test_the_example_tokenizes_a_folder_by_datatrove(shards_of_text, tmp_path):
    """The command of docs/how-to/tokens.md."""
    pytest.importorskip("datatrove")
    (tmp_path / "texts").mkdir()
    texts = [[document.text for document in generate(3, seed)] for seed in range(2)]
    for number, part in enumerate(texts):
        lines = (json.dumps({"text": text, "id": str(i)}) for i, text in enumerate(part))
        (tmp_path / f"texts/{number}.jsonl").write_text("\n".join(lines))
    shutil.copy(shards_of_text / "tokenizer.json", tmp_path)
    arguments = ["texts", "tokenizer.json", "my-tokens"]
    subprocess.run([sys.executable, EXAMPLE, *arguments], cwd=tmp_path, check=True)
    map_files(
        tmp_path / "my-tokens",
        tmp_path / "out",
        Tokenize(tokenizer=str(shards_of_text)),
        documents=6,
    )
    tokenizer = load_tokenizer(shards_of_text / "tokenizer.json")
    texts_of_tokens = [
        tokenizer.decode(ids[:-1]) for split in splits(tmp_path / "out") for ids in documents(split)
    ]
    assert sorted(texts_of_tokens) == sorted(texts[0] + texts[1])


def test_files_of_a_folder_follow_each_other_by_name_whatever_their_types(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    nanogpt(folder, [[1, 2, 0], [3, 0]]).rename(folder / "a.bin")
    megatron(folder, [[4, 5, 6, 0]], "int32")
    datatrove(folder / "deep", [[7, 0], [8, 9, 0]], "uint32")
    (folder / "z.bin").touch()  # a rank without documents
    (folder / "readme.txt").write_text("no tokens")
    assert map_files(folder, tmp_path / "out", share=0.4).tolist() == [3, 2, 2]
    train, validation = splits(tmp_path / "out")
    assert train.read(0, len(train)).tolist() == [1, 2, 0, 3, 0, 7, 0]
    assert validation.read(0, len(validation)).tolist() == [8, 9, 0, 4, 5, 6, 0]
    map_files(folder, tmp_path / "out", share=0.34, documents=3)
    assert [len(split) for split in splits(tmp_path / "out")] == [5, 2]


@pytest.mark.parametrize(
    ("tokens", "lengths"), [([0, 1, 2, 0, 3, 0, 4], [3, 2]), ([1, 2, 0, 3, 0, 4], [3, 2])]
)
def test_an_end_of_text_may_begin_documents_and_the_last_may_have_none(tmp_path, tokens, lengths):
    assert map_files(nanogpt(tmp_path, [tokens]), tmp_path / "out").tolist() == lengths
    train, validation = splits(tmp_path / "out")
    assert len(train) + len(validation) == len(tokens)


def test_rows_and_indexed_documents_need_no_end_of_text(tmp_path):
    for number, write in enumerate([saved_dataset, megatron, datatrove]):
        (folder := tmp_path / str(number)).mkdir()
        lengths = map_files(write(folder, [[1, 2, 3], [4], [5, 6]]), folder / "out")
        assert lengths.tolist() == [3, 1]
        assert len(splits(folder / "out")[1]) == 2


def test_a_column_and_a_split_of_a_dataset_are_named(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"ids": [[1, 2, 0], [3, 0], [4, 0]]})
    fixed = datasets.List(datasets.Value("uint16"), length=2)
    pairs = datasets.Dataset.from_dict({"ids": [[1, 0]] * 4}).cast_column("ids", fixed)
    datasets.DatasetDict({"train": pairs, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    map_files(tmp_path / "saved", tmp_path / "out", ids_column="ids")
    assert len(splits(tmp_path / "out")[0]) == 6
    map_files(tmp_path / "saved", tmp_path / "out", ids_column="ids", split="test")
    assert len(splits(tmp_path / "out")[0]) == 5
    with pytest.raises(UserError, match=r"no column 'input_ids' \(it has ids\).*data.ids_column"):
        map_files(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(UserError, match=r"no split 'other' \(it has test, train\).*data\.split"):
        map_files(tmp_path / "saved", tmp_path / "out", split="other")


def test_a_folder_of_saved_datasets_gives_each_row_once_and_no_other_split(tmp_path):
    import datasets

    folder = tmp_path / "all"
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 0], [2, 0], [3, 0]]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder / "a"))
    rows.save_to_disk(str(folder / "b"))
    # what .map and .filter leave beside the data
    saved = next((folder / "b").glob("*.arrow"))
    saved.with_name("cache-0123456789abcdef.arrow").write_bytes(saved.read_bytes())
    map_files(folder, tmp_path / "out")
    mapped = [document for split in splits(tmp_path / "out") for document in documents(split)]
    assert mapped == 2 * [[1, 0], [2, 0], [3, 0]]


def test_rows_without_ids_are_documents_without_tokens(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[], [], [1, 2], [3]]})
    rows.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    map_files(tmp_path / "saved", tmp_path / "out", share=0.3)
    assert [len(split) for split in splits(tmp_path / "out")] == [2, 1]
    with pytest.raises(UserError, match="no token of the 4 documents falls into the training"):
        map_files(tmp_path / "saved", tmp_path / "out", share=0.5)


def test_files_without_end_of_text_are_a_document_each(tmp_path):
    (folder := tmp_path / "two").mkdir()
    np.arange(1, 41, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(1, 21, dtype=np.uint16).tofile(folder / "val.bin")
    with pytest.raises(UserError, match=r"; raise it \(one document is 0\.5\), or give more doc"):
        map_files(folder, tmp_path / "out", share=0.1)
    map_files(folder, tmp_path / "out", share=0.5)
    assert [len(split) for split in splits(tmp_path / "out")] == [40, 20]
    (folder / "val.bin").unlink()
    with pytest.raises(UserError, match=r"validation_share 0\.5; give more documents"):
        map_files(folder, tmp_path / "out", share=0.5)


def test_files_where_the_stages_write_are_refused_and_stay(tmp_path):
    (folder := tmp_path / "out/tokens").mkdir(parents=True)
    path = nanogpt(folder, DOCUMENTS)
    for source in (path, folder, tmp_path / "out"):
        with pytest.raises(UserError, match=r"the stages write to .*: move your files elsewhere"):
            map_files(source, tmp_path / "out")
    assert path.is_file()


def test_a_file_under_two_names_is_refused(tmp_path):
    (folder := tmp_path / "all").mkdir()
    (folder / "latest.bin").symlink_to(nanogpt(folder, DOCUMENTS))
    with pytest.raises(UserError, match=r"latest\.bin: the same file as .*train\.bin"):
        map_files(folder, tmp_path / "out")


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    (folder := tmp_path / "all").mkdir()
    nanogpt(folder, DOCUMENTS)
    (folder / "b.bin").symlink_to(tmp_path / "gone.bin")
    with pytest.raises(UserError, match=r"b\.bin: no such file"):
        map_files(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, r"data\.split: no file that datasets saved is there: remove it"),
        ({"ids_column": "ids"}, r"data\.ids_column: no file that datasets saved .*: remove it"),
    ],
)
def test_options_of_datasets_are_refused_where_there_is_none(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        map_files(nanogpt(tmp_path, DOCUMENTS), tmp_path / "out", **options)


def test_tokens_of_32_bits_are_not_taken_for_twice_as_many_of_16(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 2, 3, 0, 4, 0], np.uint32).tofile(path)
    with pytest.raises(UserError, match="every second number of 16 bits is 0, so tokens have 32"):
        map_files(path, tmp_path / "out")


def test_the_largest_special_token_that_the_tokens_hold_needs_a_row(tmp_path, shards_of_text):
    """Special tokens that no text brings need none, but others may have put them there."""
    tokenizer = json.loads((shards_of_text / "tokenizer.json").read_text())
    special = {"content": "<turn>", "special": True, "normalized": False, "single_word": False}
    tokenizer["added_tokens"].append({"id": 400, "lstrip": False, "rstrip": False, **special})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = Tokenize(tokenizer=str(tmp_path))
    for token, vocabulary in ((399, 400), (400, 401)):
        map_files(nanogpt(tmp_path, [[1, token, 0], [2, 0]]), tmp_path / "out", options, share=0.5)
        assert read_manifest(tmp_path / "out/tokens").vocabulary == vocabulary
    with pytest.raises(UserError, match=r"token 401, .* 401: .*tokenize\.tokenizer"):
        map_files(nanogpt(tmp_path, [[1, 401, 0], [2, 0]]), tmp_path / "out", options)


def damaged(write, suffix, change):
    """A writer whose file with this suffix is changed."""

    def writer(folder):
        path = write(folder, DOCUMENTS)
        file = next(file for file in folder.iterdir() if file.name.endswith(suffix))
        file.write_bytes(change(file.read_bytes()))
        return path

    return writer


def rows(*values):
    def writer(folder):
        import datasets

        path = folder / "saved"
        datasets.Dataset.from_dict({"input_ids": list(values)}).save_to_disk(str(path))
        return path

    return writer


def parquet(folder):
    import datasets

    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_parquet(str(folder / "a.parquet"))
    return folder


def swapped(raw):
    return raw[:34] + struct.pack("<3i", 2, 4, 6) + raw[46:]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (damaged(nanogpt, ".bin", lambda raw: raw[:-1]), "its 23 bytes do not divide into uint16"),
        (damaged(nanogpt, ".bin", lambda raw: b""), "no tokens"),
        (damaged(nanogpt, ".bin", lambda raw: b"\xff\xff" + raw), r"token 65535, .* 400: "),
        (damaged(WRITERS["llmc"], ".bin", lambda raw: raw[:-2]), "header says 12 tokens"),
        (damaged(megatron, ".bin", lambda raw: raw[:-2]), r"does not match .*\.bin"),
        (damaged(megatron, ".idx", lambda raw: raw[:-8]), r"does not match .*\.bin"),
        (damaged(megatron, ".idx", lambda raw: raw[:17] + b"\x07" + raw[18:]), "does not match"),
        (damaged(megatron, ".idx", swapped), "does not match"),
        (damaged(megatron, ".idx", lambda raw: b"index"), "does not match"),
        (damaged(datatrove, ".index", lambda raw: raw[:8]), r"does not match .*\.ds"),
        (damaged(datatrove, ".index", lambda raw: raw[8:16] + raw[:8] + raw[16:]), "not match"),
        (rows([1, 2, 0], [1, -1]), r"token -1, .* 400: "),
        (rows([1, 2, 0], [1, None]), "a row without ids, or an id that is null"),
        (rows([1, 2, 0], None), "a row without ids, or an id that is null"),
        (rows([1.5], [2.5]), "column 'input_ids' holds .*double.*, not lists of ids"),
        (rows(1, 2), r"column 'input_ids' holds int\d+, not lists of ids"),
        (parquet, r"a\.parquet: .*cannot be mapped.*save_to_disk"),
        (lambda folder: folder, r"no \.bin, \.ds or \.arrow file"),
        (lambda folder: folder / "no.bin", "no such file or folder"),
    ],
)
def test_what_is_no_token_file_is_refused_in_a_line_with_its_name(tmp_path, write, message):
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in")
    with pytest.raises(UserError, match=message) as refused:
        map_files(path, tmp_path / "out")
    assert str(tmp_path / "in") in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out/tokens").exists()


@pytest.mark.parametrize(
    ("share", "message"),
    [(0.01, "3 documents.*validation.*raise it"), (0.99, "3 documents.*training.*lower it")],
)
def test_a_split_without_documents_is_refused_with_the_fix(tmp_path, share, message):
    with pytest.raises(UserError, match=message):
        map_files(nanogpt(tmp_path, DOCUMENTS), tmp_path / "out", share=share)


def test_tokens_are_those_that_were_counted_wherever_their_file_got_its_date(tmp_path):
    path = nanogpt(tmp_path, DOCUMENTS)
    map_files(path, tmp_path / "out")
    os.utime(path, (1, 1))
    assert len(splits(tmp_path / "out")[0]) == 6
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + b"\x01\x00")
    with pytest.raises(UserError, match=r"train\.bin: changed .*shardlab prepare"):
        splits(tmp_path / "out")
    path.write_bytes(raw[:-2])
    with pytest.raises(UserError, match=r"train\.bin: changed .*shardlab prepare"):
        splits(tmp_path / "out")
    path.rename(tmp_path / "moved.bin")
    with pytest.raises(UserError, match=r"train\.bin: no such file.*data\.path"):
        splits(tmp_path / "out")


def test_tokens_that_change_between_the_stages_are_refused(tmp_path):
    path = nanogpt(tmp_path, DOCUMENTS)
    os.utime(path, (1, 1))
    data = Data(source="tokens", path=str(path), validation_share=0.34)
    files = prepare(data, tmp_path / "corpus.json", tmp_path)["files"]
    np.array(flat(reversed(DOCUMENTS)), np.uint16).tofile(path)
    with pytest.raises(UserError, match=r"train\.bin: changed .*shardlab prepare"):
        map_tokens(data, NUMBERS, files, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mapped_files_replace_shards_of_a_text(shards_of_text, tmp_path):
    shutil.copytree(shards_of_text, tmp_path / "out")
    map_files(nanogpt(tmp_path, DOCUMENTS), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out/tokens").iterdir()] == ["manifest.json"]
