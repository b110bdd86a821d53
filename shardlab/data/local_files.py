"""Records of files on this machine: plain text, JSON arrays and JSON lines, packed or not.

All of them are read in constant memory and linear time.
"""

import bz2
import codecs
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import ijson
import orjson

from shardlab.core.errors import UserError
from shardlab.data.source_records import LARGEST, TOO_LARGE, Tally

PACKED = (".gz", ".bz2", ".zst")
SEPARATOR = "<|endoftext|>"
"""between documents by default, as in TinyStories and OpenAI's files"""
_TEXT_ENDINGS = (".txt", ".md")
_CHUNK = 1 << 18
_DEEPEST = 1024
"""levels of a record, as orjson allows"""


@contextmanager
def open_packed(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, unpacked as it is read if its name ends in .gz, .bz2 or .zst.

    Raises:
        UserError: in the block too: packed contents are damaged or end early.
    """
    try:
        with _open(path) as file:
            yield file
    except UserError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if path.suffix not in PACKED:
            raise
        reason = " ".join(str(error).split())[:100]
        fix = "fetch it again, or rename it if it is not packed"
        if "memory" in reason:  # the window of Reddit's dumps
            fix = "unpack it by zstd -d --long=31"
        raise UserError(f"{path}: cannot be unpacked as {path.suffix} ({reason}); {fix}") from None


def _open(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(path)))
    if path.suffix == ".bz2":
        return io.BufferedReader(cast(io.RawIOBase, bz2.open(path)))
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"{path}: .zst needs the pyarrow package: pip install 'shardlab[datasets]'"
        ) from None
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _skip_mark(file: io.BufferedReader) -> None:
    """Pass over a byte order mark of UTF-8."""
    if file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)


def read_json_array(path: Path, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and value of each record.

    Raises:
        UserError: no array, or not JSON, or a record that is too large or too deep, with its
            number; the records before it have been passed on, so the caller commits only at the
            end.
    """
    # where Python refuses a number for its length, ijson ends the process
    sys.set_int_max_str_digits(0)
    number = 0
    with open_packed(path) as file:
        _skip_mark(file)
        reader = _Reader(file)
        try:
            if file.peek().lstrip()[:1] != b"[":
                raise ijson.JSONError(_NO_ARRAY)
            events = ijson.parse(_shallow(ijson.basic_parse(reader, buf_size=_CHUNK)))
            for number, value in enumerate(ijson.items(events, "item"), start=1):
                reader.since_record = 0
                yield f"record {number}", str(number), value
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: record {number + 1}: {_complaint(error)}") from None


def _shallow(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield events of ijson, whose memory is quadratic in the depth of a value."""
    depth = 0
    for event, value in events:
        depth += event in ("start_map", "start_array")
        depth -= event in ("end_map", "end_array")
        if depth > _DEEPEST + 1:
            raise ijson.JSONError(f"nested more than {_DEEPEST} levels deep")
        yield event, value


_NO_ARRAY = "expected an array of records; for one object per line set data.source to jsonl"


class _Reader:
    """File for ijson, which would read a single record whole however large it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.since_record = 0
        """bytes since the last record"""

    def read(self, size: int) -> bytes:
        self.since_record += size
        if self.since_record > 2 * LARGEST:
            raise ijson.JSONError(f"a record of over {2 * LARGEST >> 20} MiB")
        return self._file.read(size)


def _complaint(error: Exception) -> str:
    """Return the kind of a mistake in JSON, in the words of the parser."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    said = error.args[0]  # bytes where the file is not UTF-8
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    reason = text.splitlines()[0].rstrip(".")
    if reason == _NO_ARRAY:
        return f"cannot be read as a JSON array ({reason})"
    return (
        f"cannot be read as a JSON array ({reason}); fix it (NaN and Infinity are no JSON), or "
        "fetch the file again"
    )


def read_json_lines(path: Path, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the line number from 1) and value; empty lines are skipped.

    A line that is too large or not JSON is a bad record.
    """
    with open_packed(path) as file:
        _skip_mark(file)
        for number in count(1):
            line = file.readline(LARGEST)
            if not line:
                return
            kind = None
            if len(line) == LARGEST and not line.endswith(b"\n"):
                kind, line = TOO_LARGE, b""
                while (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
                    pass
            try:
                if line.strip():
                    yield f"line {number}", str(number), _parse(line)
            except orjson.JSONDecodeError as error:
                kind = f"not JSON ({error.msg})"
            if kind is not None:
                tally.bad(f"line {number}", kind, "fix it: each line is a whole record")


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        # json.dumps writes NaN and Infinity, which are no JSON, in fields that nobody reads here
        if b"NaN" in line or b"Infinity" in line:
            with suppress(ValueError, RecursionError):
                return json.loads(line.decode())
        raise error from None


def read_text(root: Path, separator: str, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id and `{"text": ...}` of each document of a file or of a folder.

    A folder's `.txt` and `.md` files, packed ones too, are read in the order of their names, those
    of folders in it too; hidden ones are passed over. An id is the number of the document in its
    file, after the file's name where there is a folder.

    Args:
        separator: between two documents of a file; a file without it is one document. Line ends
            are newlines, whatever the file has.

    Raises:
        UserError: the folder has no such files, or one of them cannot be unpacked.
    """
    if root.is_file():
        yield from _read_text_file(root, "", separator, tally)
        return
    for path in text_files(root):
        yield from _read_text_file(path, f"{path.relative_to(root)}:", separator, tally)


def text_files(folder: Path) -> Iterator[Path]:
    """Return the files of plain text in a folder and those below it, in order.

    Raises:
        UserError: there is none.
    """
    paths = _text_files(folder)
    if (first := next(paths, None)) is None:
        raise UserError(
            f"data.path {str(folder)!r}: a folder without {' or '.join(_TEXT_ENDINGS)} files; "
            "name files so, give one file, or another data.source"
        )
    return chain([first], paths)


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            stem, ending = os.path.splitext(name)  # noqa: PTH122 - there may be millions of names
            if (stem if ending in PACKED else name).endswith(_TEXT_ENDINGS) and name[0] != ".":
                yield Path(parent, name)


def _read_text_file(
    path: Path, prefix: str, separator: str, tally: Tally
) -> Iterator[tuple[str, str, Any]]:
    with open_packed(path) as raw:
        # what is not UTF-8 becomes half of a surrogate pair, and that document a bad record
        file = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape")
        for number, text in enumerate(_split(file, separator), start=1):
            position = f"{prefix and prefix + ' '}document {number}"
            if text is None:
                tally.bad(position, f"{TOO_LARGE}, or data.separator does not fit")
            else:
                yield position, f"{prefix}{number}", {"text": text.strip()}


def _split(file: TextIO, separator: str) -> Iterator[str | None]:
    """Yield what is between separators, None in root of what is larger than `LARGEST`."""
    rest, is_large = "", False
    while chunk := file.read(_CHUNK):
        *ended, rest = (rest + chunk).split(separator)
        for text in ended:
            yield None if is_large else text
            is_large = False
        if len(rest) > LARGEST:
            is_large = True
        if is_large:
            rest = rest[-len(separator) :]  # a separator may have begun in it
    yield None if is_large else rest
