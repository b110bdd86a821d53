"""Records of a JSON array of any size, in constant memory, with exact error positions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from shardlab.core.errors import UserError

# the pure-Python parser is 27 times slower, and ijson would fall back on it silently
_PARSER = ijson.get_backend("yajl2_c")
_CHUNK = 1 << 16


def read_json_array(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield position, number from 1 and value of each record.

    The parser replaces half a surrogate pair (`\\ud800` alone) by `?`.

    Raises:
        UserError: a syntax error or an early end, with its byte offset and record number; the
            records before it have been passed on, so the caller commits only at the end.
    """
    with path.open("rb") as file:
        _expect_array(path, file)
        number = 0
        values = ijson.sendable_list()
        parser = _PARSER.items_coro(values, "item", use_float=True)
        while True:
            start = file.tell()
            chunk = file.read(_CHUNK)
            try:
                parser.send(chunk) if chunk else parser.close()
            except ijson.JSONError as error:
                raise _syntax_error(path, start, number + len(values) + 1, error) from None
            for value in values:
                number += 1
                yield f"record {number}", number, value
            del values[:]
            if not chunk:
                return


def _expect_array(path: Path, file: BinaryIO) -> None:
    first = file.read(_CHUNK).lstrip()[:1]
    file.seek(0)
    if first and first != b"[":
        raise UserError(
            f"{path}: byte 0, record 1: expected a JSON array, found {first!r}; "
            "for one object per line set data.source to jsonl"
        )


def _syntax_error(path: Path, start: int, number: int, error: Exception) -> UserError:
    offset = _offset(path, start)
    size = path.stat().st_size
    if offset >= size:
        reason = "the file ends in the middle (truncated?)"
    else:
        reason = str(error).removeprefix("b'").replace("\\n", "\n").partition("\n")[0]
    return UserError(
        f"{path}: byte {offset}, record {number}: {reason}; fix the file or fetch it again"
    )


def _offset(path: Path, start: int) -> int:
    """Find the byte at which parsing fails by feeding the last chunk bytewise."""
    parser = _PARSER.basic_parse_coro(ijson.sendable_list(), use_float=True)
    with path.open("rb") as file:
        for _ in range(start // _CHUNK):
            parser.send(file.read(_CHUNK))
        for offset, byte in enumerate(file.read(_CHUNK), start):
            try:
                parser.send(bytes([byte]))
            except ijson.JSONError:
                return offset
        return file.tell()
