"""Rows of a Parquet file in bounded memory: a few at a time, from pages that were measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardlab.core.errors import UserError
from shardlab.data.limits import LARGEST, TOO_LARGE
from shardlab.data.parquet_pages import pages_of
from shardlab.data.source_records import FIELDS, Fields, Tally

_PAGES = 6 * LARGEST
"""bytes of a page of each column, packed and unpacked; one of a dictionary may be beside it"""
_ROWS = 2 * LARGEST
"""bytes of the rows that are decoded at once; none is larger than a page"""
_MOST = 1000
_BUFFER = 1 << 20


def read_parquet(
    path: Path, tally: Tally, fields: Fields = FIELDS
) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and row, of the columns of `fields` and `id`.

    Raises:
        UserError: not Parquet, a column is missing or nested, or its pages are too large.
    """
    for number, row in enumerate(_read(path, fields), start=1):
        if row is None:
            tally.bad(f"record {number}", TOO_LARGE)
        else:
            yield f"record {number}", str(number), row


def _read(path: Path, fields: Fields) -> Iterator[dict[str, Any] | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            _expect_small_footer(path, file)
            parquet = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
            columns = _columns(path, parquet.schema, fields)
            rows = _ROWS // max(1, _largest(path, parquet.metadata, columns))
            batches = parquet.iter_batches(
                max(1, min(_MOST, rows)), columns=columns, use_threads=False
            )
            for batch in batches:
                yield from _rows(batch)
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as Parquet ({reason}); fetch it again") from None


def _expect_small_footer(path: Path, file: BinaryIO) -> None:
    file.seek(max(0, path.stat().st_size - 8))
    size = int.from_bytes(file.read(4), "little")
    if file.read() == b"PAR1" and size > LARGEST:
        raise UserError(f"{path}: its footer is {TOO_LARGE}; write it again with fewer row groups")
    file.seek(0)


def _columns(path: Path, schema: Any, fields: Fields) -> list[str]:
    """Return those of our columns that the file has."""
    found = [schema.column(i).path for i in range(len(schema))]
    ours = "id", fields.title or "title", fields.text
    for name in ours:
        if any(each.startswith(f"{name}.") for each in found):
            raise UserError(f"{path}: column {name!r} is nested; make it a column of text")
    expect_columns(str(path), found, fields)
    return [name for name in ours if name in found]


def expect_columns(place: str, found: list[str], fields: Fields) -> None:
    """Check that the columns of a table contain the text, and the title if it is named.

    Raises:
        UserError: one is missing.
    """
    for key, name in (("text_column", fields.text), ("title_column", fields.title)):
        if name is not None and name not in found:
            raise UserError(
                f"{place}: no column {name!r} (it has {', '.join(found)[:200]}); "
                f"set data.{key} to the right one"
            )


def _largest(path: Path, metadata: Any, columns: list[str]) -> int:
    """Return the bytes of the largest pages of all columns together.

    Raises:
        UserError: they are over the limit.
    """
    largest = dict.fromkeys(columns, 0)
    held = dict.fromkeys(columns, 0)
    with path.open("rb") as file:
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            for chunk in (group.column(i) for i in range(group.num_columns)):
                name = chunk.path_in_schema
                if name not in largest:
                    continue
                for page in pages_of(file, chunk):
                    largest[name] = max(largest[name], page.uncompressed)
                    held[name] = max(held[name], sum(page))
                    if sum(held.values()) > _PAGES:
                        raise UserError(
                            f"{path}: its pages of {', '.join(columns)} are larger than "
                            f"{_PAGES >> 20} MiB together; write it again with fewer rows in each "
                            "(pyarrow: write_batch_size=16)"
                        )
    return sum(largest.values())


def _rows(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield rows, and None for those that are too large."""
    if batch.nbytes <= LARGEST:
        yield from batch.to_pylist()
        return
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        yield None if row.nbytes > LARGEST else row.to_pylist()[0]
