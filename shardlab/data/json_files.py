"""Records of JSON arrays and JSON lines, in constant memory and linear time."""

import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from shardlab.core.errors import UserError
from shardlab.data.limits import LARGEST, TOO_LARGE
from shardlab.data.packed import open_packed, skip_mark
from shardlab.data.source_records import Tally

_CHUNK = 1 << 18
_MOST_BRACKETS = 1 << 20
"""objects and arrays in a record; each takes up to 240 bytes once it is decoded"""


class _Raw(NamedTuple):
    number: int
    """from 1"""
    offset: int
    """of its first byte in the file"""
    content: bytes | None
    """none when it is larger than `LARGEST`"""


def read_json(path: Path, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Read a file by `read_json_array` or `read_json_lines`, as it begins."""
    with open_packed(path) as file:
        skip_mark(path, file)
        _skip_space(file)
        is_array = file.peek(1)[:1] == b"["
    yield from (read_json_array if is_array else read_json_lines)(path, tally)


def read_json_array(path: Path, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and value of each record.

    A record that is not JSON is a bad record; those after it are read if its brackets and
    quotation marks are in pairs.

    Raises:
        UserError: no array, text after it, or an early end, with byte offset and record number; the
            records before it have been passed on, so the caller commits only at the end.
    """
    with open_packed(path) as file:
        yield from _decode(_elements(path, file), "record", tally)


def read_json_lines(path: Path, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the line number from 1) and value; empty lines are skipped.

    A line that is not JSON is a bad record, named with the byte offset of the error.
    """
    with open_packed(path) as file:
        yield from _decode(_lines(path, file), "line", tally)


def _decode(raws: Iterable[_Raw], name: str, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    for number, offset, content in raws:
        if content is None:
            tally.bad(f"{name} {number}, byte {offset}", TOO_LARGE)
        elif content.count(b"{") + content.count(b"[") > _MOST_BRACKETS:
            tally.bad(f"{name} {number}, byte {offset}", f"over {_MOST_BRACKETS} brackets")
        else:
            try:
                value = orjson.loads(content)
            except orjson.JSONDecodeError as error:
                place, kind = _complaint(content, error)
                tally.bad(f"{name} {number}, byte {offset + place}", kind)
            else:
                yield f"{name} {number}", str(number), value


def _complaint(content: bytes, error: orjson.JSONDecodeError) -> tuple[int, str]:
    """Return the byte of a syntax error in a record, and its kind."""
    try:
        content.decode()
    except UnicodeDecodeError as wrong:
        return wrong.start, "not UTF-8"
    place = len(error.doc[: error.pos].encode())
    for words, kind in _KINDS.items():
        if words in error.msg:
            return place, kind
    return place, "not JSON"


_KINDS = {
    "surrogate": "half of a surrogate pair in the text",
    "infinity": "a number out of range",
    "depth limit": "nested too deeply",
}


def _lines(path: Path, file: BufferedReader) -> Iterator[_Raw]:
    offset = skip_mark(path, file)
    for number in count(1):
        line = file.readline(LARGEST)
        start = offset
        offset += len(line)
        if len(line) < LARGEST or line.endswith(b"\n"):
            if line and not line.isspace():
                yield _Raw(number, start, line)
        else:
            del line  # two of them would be in memory
            yield _Raw(number, start, None)
            while (line := file.readline(_CHUNK)) and not line.endswith(b"\n"):
                offset += len(line)
            offset += len(line)
        if not line:
            return


def _elements(path: Path, file: BufferedReader) -> Iterator[_Raw]:
    """Cut an array at its commas."""
    offset = skip_mark(path, file)
    offset += _open_array(path, file, offset)
    separators = _Separators()
    element = _Element(1, offset)
    while chunk := file.read(_CHUNK):
        start = 0
        for end in separators.of(chunk):
            element.add(chunk[start:end])
            start, last = end + 1, chunk[end : end + 1] == b"]"
            if not (last and element.is_first_and_empty()):
                yield element.raw()
            if last:
                _expect_end(path, file, chunk[start:], offset + start)
                return
            element = _Element(element.number + 1, offset + start)
        element.add(chunk[start:])
        offset += len(chunk)
    raise UserError(
        f"{path}: record {element.number}, byte {offset}: the file ends in the middle "
        "(truncated?); fix the file or fetch it again"
    )


class _Element:
    """Bytes of one element of an array as they arrive; dropped once they are too many."""

    def __init__(self, number: int, offset: int) -> None:
        self.number = number
        self._offset = offset
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= LARGEST:
            self._parts.append(part)
        else:
            self._parts.clear()

    def is_first_and_empty(self) -> bool:
        return self.number == 1 and not b"".join(self._parts).strip()

    def raw(self) -> _Raw:
        if self._size > LARGEST:
            return _Raw(self.number, self._offset, None)
        content = b"".join(self._parts)
        record = content.lstrip()
        return _Raw(self.number, self._offset + len(content) - len(record), record)


# possessive or atomic, so that no state is kept for going back. Up to Python 3.11.4 a possessive
# group keeps what a last repetition took that failed (gh-106052): an atomic one does not
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BETWEEN = re.compile(rb'[^"\[\]{},]*+')
_INSIDE = re.compile(rb'(?>(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*)', re.DOTALL)


class _Separators:
    """Positions of the commas and the end of an array; looks at each byte once, wherever the
    chunks end."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def of(self, chunk: bytes) -> Iterator[int]:
        position = int(self._escaped)
        self._escaped = False
        while position < len(chunk):
            pattern = _STRING if self._quoted else _INSIDE if self._depth else _BETWEEN
            position = pattern.match(chunk, position).end()  # type: ignore[union-attr]
            byte = chunk[position : position + 1]
            if byte == b'"':
                self._quoted = not self._quoted
            elif byte == b"\\":  # the chunk ends with it
                self._escaped = True
            elif byte in (b"[", b"{"):
                self._depth += 1
            elif self._depth and byte in (b"]", b"}"):
                self._depth -= 1
            elif byte in (b",", b"]"):
                yield position
            position += 1


def _open_array(path: Path, file: BufferedReader, offset: int) -> int:
    """Pass over the opening bracket, and return the number of bytes passed."""
    passed = _skip_space(file)
    found = file.read(1)
    if found != b"[":
        raise UserError(
            f"{path}: record 1, byte {offset}: expected a JSON array, found {found!r}; "
            "for one object per line set data.source to jsonl"
        )
    return passed + 1


def _skip_space(file: BufferedReader) -> int:
    """Pass over white space, and return the number of bytes passed."""
    passed = 0
    while head := file.peek():
        blanks = len(head) - len(head.lstrip())
        file.read(blanks)
        passed += blanks
        if blanks < len(head):
            break
    return passed


def _expect_end(path: Path, file: BufferedReader, rest: bytes, offset: int) -> None:
    while rest := rest or file.read(_CHUNK):
        if not rest.isspace():
            place = offset + len(rest) - len(rest.lstrip())
            raise UserError(f"{path}: byte {place}: text after the array; remove it")
        offset, rest = offset + len(rest), b""
