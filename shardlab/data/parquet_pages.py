"""Sizes of the pages of a Parquet file, from their headers alone.

Nothing in the footer bounds a page, and readers decompress it whole. Headers are structs of
Thrift's compact protocol (parquet.thrift of Apache Parquet; thrift-compact-protocol.md).
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

_SHORT = 1 << 16
"""bytes; statistics in a header are shorter"""
_DEEPEST = 8
_BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 3, 7, 8, 9, 10, 12
_NUMBERS = 4, 5, 6


class Page(NamedTuple):
    """Bytes of a page."""

    uncompressed: int
    compressed: int


def pages_of(file: BinaryIO, column: Any) -> Iterator[Page]:
    """Yield the pages of a column chunk (a `ColumnChunkMetaData` of pyarrow).

    Raises:
        ValueError: there is no header where one should be.
    """
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    file.seek(start)
    while file.tell() < start + column.total_compressed_size:
        try:
            fields = _struct(file, 0)
            page = Page(fields[2], fields[3])
        except (IndexError, KeyError):
            raise ValueError(f"no page header before byte {file.tell()}") from None
        if min(page) < 0:
            raise ValueError(f"a page of negative size before byte {file.tell()}")
        yield page
        file.seek(page.compressed, 1)


def _struct(file: BinaryIO, depth: int) -> dict[int, int]:
    """Read a struct; return its fields that are whole numbers."""
    if depth > _DEEPEST:
        raise IndexError
    fields, number = {}, 0
    while head := file.read(1)[0]:
        kind = head & 15
        number = number + (head >> 4) if head >> 4 else _number(file)
        if kind in _NUMBERS:
            fields[number] = _number(file)
        elif kind > 2:  # a boolean is in the head
            _skip(file, kind, depth)
    return fields


def _skip(file: BinaryIO, kind: int, depth: int) -> None:
    if kind in (_BYTE, _DOUBLE):
        file.read(1 if kind == _BYTE else 8)[0]
    elif kind == _BINARY:
        length = _varint(file)
        if length > _SHORT:
            raise IndexError
        file.seek(length, 1)
    elif kind in (_LIST, _SET):
        head = file.read(1)[0]
        for _ in range(_varint(file) if head >> 4 == 15 else head >> 4):
            _element(file, head & 15, depth)
    elif kind == _STRUCT:
        _struct(file, depth + 1)
    else:
        raise IndexError  # no header has maps


def _element(file: BinaryIO, kind: int, depth: int) -> None:
    if kind in _NUMBERS:
        _varint(file)
    else:
        _skip(file, _BYTE if kind <= 2 else kind, depth)


def _number(file: BinaryIO) -> int:
    raw = _varint(file)
    return (raw >> 1) ^ -(raw & 1)


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise IndexError
