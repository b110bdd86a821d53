"""Parquet files whose parts are enormous, torn or of other types take bounded memory."""

import random

import pytest

from shardlab.core.errors import UserError
from shardlab.data import parquet
from shardlab.data.limits import LARGEST, TOO_LARGE
from shardlab.data.parquet import read_parquet
from shardlab.data.parquet_pages import pages_of
from shardlab.data.source_records import Tally

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, texts, **options):
    titles = [f"T{i}" for i in range(len(texts))]
    pq.write_table(pa.table({"title": titles, "text": texts}), path, **options)
    return path


def read(*paths, policy="refuse"):
    tally = Tally(policy, "rows")
    return [row for path in paths for *_, row in read_parquet(path, tally)], tally.as_json()[
        "bad_records"
    ]


LAYOUTS = [
    {"compression": c, "data_page_version": v, "use_dictionary": d, "write_statistics": d}
    for c, v, d in [("snappy", "1.0", True), ("zstd", "2.0", False), ("none", "2.0", True)]
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_several_groups_files_and_batches_come_in_order(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(parquet, "_MOST", 7)
    texts = [random.Random(i).randbytes(40).hex() for i in range(100)]
    one = write(tmp_path / "1.parquet", texts[:60], row_group_size=25, **layout)
    other = write(tmp_path / "2.parquet", texts[60:], data_page_size=500, **layout)
    assert [row["text"] for row in read(one, other)[0]] == texts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_headers_add_up_to_the_sizes_of_the_footer(tmp_path, layout):
    path = write(tmp_path / "x.parquet", ["some text", "é"] * 5000, data_page_size=900, **layout)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(1)
    with path.open("rb") as file:
        pages = [*pages_of(file, chunk)]
    headers = chunk.total_compressed_size - sum(page.compressed for page in pages)
    assert len(pages) > 1
    assert sum(page.uncompressed for page in pages) + headers == chunk.total_uncompressed_size


def test_pages_that_are_too_large_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", ["x" * 1000] * 1000, use_dictionary=False)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(parquet, "_PAGES", 1_000_000)
    with pytest.raises(
        UserError, match=r"^\S+: its pages of title, text are larger than .* write it again"
    ):
        read(path)


def test_a_row_over_the_limit_is_a_bad_record(tmp_path):
    path = write(tmp_path / "x.parquet", ["a", "x" * (LARGEST + 1), "b"])
    rows, bad = read(path, policy="skip")
    assert [row["text"] for row in rows] == ["a", "b"]
    assert bad["first"] == [f"record 2: {TOO_LARGE}"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"title": ["a"], "text": [["a", "b"]]}, "column 'text' is nested"),
        ({"content": ["a"]}, r"no column 'text' \(it has content\); set data.text_column to"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path, columns, message):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(UserError, match=message):
        read(path)


def test_a_damaged_file_is_one_line_or_whole(tmp_path):
    path = write(tmp_path / "x.parquet", [f"text {i}" for i in range(300)], data_page_size=500)
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(200):
        torn = bytearray(whole)
        torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(8)
        path.write_bytes(torn[: chance.choice([len(torn), chance.randrange(len(torn))])])
        try:
            read(path, policy="skip")
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
