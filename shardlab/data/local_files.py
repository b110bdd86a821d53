"""Records of local files: plain text, JSON arrays and JSON lines, compressed or not.

Files are read in constant memory and linear time.
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
from shardlab.data.source_records import LARGEST, TOO_LARGE, RecordCounts

PACKED = (".gz", ".bz2", ".zst")
SEPARATOR = "<|endoftext|>"
"""Default separator of documents, as in TinyStories and OpenAI's files."""
_TEXT_SUFFIXES = (".txt", ".md")
_CHUNK = 1 << 18
_MAX_DEPTH = 1024
"""Largest nesting of a record, the limit of orjson."""


@contextmanager
def open_packed(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file; one whose name ends in .gz, .bz2 or .zst is unpacked while it is read.

    Raises:
        UserError: Packed content is damaged or ends early; also raised for reads in the block.
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
    """Skip a byte order mark of UTF-8."""
    if file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)


def read_json_array(path: Path, counts: RecordCounts) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the number from 1) and value of each record.

    Raises:
        UserError: The file is not a JSON array, or a record is too large or too deep. Earlier
            records have been yielded by then, so callers must commit only at the end.
    """
    # no limit of digits: where Python refuses a long number, ijson ends the process
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
    """Yield events of ijson up to a limit of depth, since its memory is quadratic in depth."""
    depth = 0
    for event, value in events:
        depth += event in ("start_map", "start_array")
        depth -= event in ("end_map", "end_array")
        if depth > _MAX_DEPTH + 1:
            raise ijson.JSONError(f"nested more than {_MAX_DEPTH} levels deep")
        yield event, value


_NO_ARRAY = "expected an array of records; for one object per line set data.source to jsonl"


class _Reader:
    """File for ijson that limits the size of a record; ijson itself has no limit."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.since_record = 0
        """Bytes read since the last record."""

    def read(self, size: int) -> bytes:
        self.since_record += size
        if self.since_record > 2 * LARGEST:
            raise ijson.JSONError(f"a record of over {2 * LARGEST >> 20} MiB")
        return self._file.read(size)


def _complaint(error: Exception) -> str:
    """Return what is wrong with the JSON, in the words of the parser, and the fix."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    message = error.args[0]  # bytes if the file is not UTF-8
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    reason = text.splitlines()[0].rstrip(".")
    if reason == _NO_ARRAY:
        return f"cannot be read as a JSON array ({reason})"
    return (
        f"cannot be read as a JSON array ({reason}); fix it (JSON has no NaN and no Infinity), or "
        "fetch the file again"
    )


def read_json_lines(path: Path, counts: RecordCounts) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id (the line number from 1) and value of each line; skip empty lines.

    A line that is too large, or is not JSON, is counted as a bad record.
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
                while (part := file.readline(_CHUNK)) and not part.endswith(b"\n"):
                    pass
            try:
                if line.strip():
                    yield f"line {number}", str(number), _parse(line)
            except orjson.JSONDecodeError as error:
                kind = f"not JSON ({error.msg})"
            if kind is not None:
                counts.add_bad(f"line {number}", kind, "fix it: each line is a whole record")


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        # json.dumps writes NaN and Infinity, which are not JSON: accept them, since the fields
        # that are read hold text
        if b"NaN" in line or b"Infinity" in line:
            with suppress(ValueError, RecursionError):
                return json.loads(line.decode())
        raise error from None


def read_text(root: Path, separator: str, counts: RecordCounts) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id and `{"text": ...}` of each document of a file or of a folder.

    A folder is read recursively: its `.txt` and `.md` files, also compressed, in the order of their
    names, without hidden files and folders. An id is the number of the document in its file; in a
    folder the name of the file precedes it.

    Args:
        separator: Text between two documents of a file; a file without it is one document. All
            line ends are read as newlines.

    Raises:
        UserError: The folder has no such files, or one of them cannot be unpacked.
    """
    if root.is_file():
        yield from _read_text_file(root, "", separator, counts)
        return
    paths = _text_files(root)
    if (first := next(paths, None)) is None:
        raise UserError(
            f"data.path {str(root)!r}: a folder without {' or '.join(_TEXT_SUFFIXES)} files: "
            "rename the files, or give one file; for tokens set data.source to tokens"
        )
    for path in chain([first], paths):
        yield from _read_text_file(path, f"{path.relative_to(root)}:", separator, counts)


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)  # noqa: PTH122 - there may be millions of names
            if (stem if suffix in PACKED else name).endswith(_TEXT_SUFFIXES) and name[0] != ".":
                yield Path(parent, name)


def _read_text_file(
    path: Path, prefix: str, separator: str, counts: RecordCounts
) -> Iterator[tuple[str, str, Any]]:
    with open_packed(path) as raw:
        # bytes that are not UTF-8 become half surrogate pairs, which make the document a bad record
        file = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape")
        for number, text in enumerate(_split(file, separator), start=1):
            position = f"{prefix and prefix + ' '}document {number}"
            if text is None:
                counts.add_bad(position, f"{TOO_LARGE}, or data.separator does not fit")
            else:
                yield position, f"{prefix}{number}", {"text": text.strip()}


def _split(file: TextIO, separator: str) -> Iterator[str | None]:
    """Yield the texts between separators, or None for a text larger than `LARGEST`."""
    tail, is_large = "", False
    while chunk := file.read(_CHUNK):
        *texts, tail = (tail + chunk).split(separator)
        for text in texts:
            yield None if is_large else text
            is_large = False
        if len(tail) > LARGEST:
            is_large = True
        if is_large:
            tail = tail[-len(separator) :]  # it may end with the begin of a separator
    yield None if is_large else tail
