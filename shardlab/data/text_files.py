"""Documents of plain text files, in constant memory and linear time."""

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from shardlab.core.errors import UserError
from shardlab.data.limits import LARGEST, TOO_LARGE
from shardlab.data.packed import PACKED, open_packed, skip_mark
from shardlab.data.source_records import Tally

SEPARATOR = "<|endoftext|>"
"""between documents by default, as in TinyStories and OpenAI's files"""
_CHUNK = 1 << 18
_ENDINGS = (".txt", ".md")


def read_text(place: Path, separator: str, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    """Yield position, id and `{"text": ...}` of each document of a file or of a folder.

    A folder's `.txt` and `.md` files, packed ones too, are read in the order of their names, those
    of folders in it too; hidden ones are passed over. An id is the number of the document in its
    file, after the file's name where there is a folder.

    Args:
        separator: between two documents of a file; a file without it is one document. Line ends
            are newlines, whatever the file has.

    Raises:
        UserError: the folder has no such files, or one of them is UTF-16 or cannot be unpacked.
    """
    if place.is_file():
        yield from _read(place, "", separator, tally)
        return
    found = False
    for path in _files(place):
        found = True
        yield from _read(path, f"{path.relative_to(place)}:", separator, tally)
    if not found:
        raise UserError(
            f"data.path {str(place)!r}: a folder without {' or '.join(_ENDINGS)} files; "
            "name files so, or give one file"
        )


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            stem, ending = os.path.splitext(name)  # noqa: PTH122 - there may be millions of names
            if (stem if ending in PACKED else name).endswith(_ENDINGS) and name[0] != ".":
                yield Path(place, name)


def _read(path: Path, prefix: str, separator: str, tally: Tally) -> Iterator[tuple[str, str, Any]]:
    with open_packed(path) as file:
        skip_mark(path, file)
        for number, content in enumerate(_split(file, separator.encode()), start=1):
            position = f"{prefix and prefix + ' '}document {number}"
            if content is None:
                tally.bad(position, f"{TOO_LARGE}, or data.separator does not fit")
                continue
            try:
                text = content.decode()
            except UnicodeDecodeError:
                tally.bad(position, "not UTF-8")
            else:
                yield position, f"{prefix}{number}", {"text": text.strip()}


def _split(file: BufferedReader, separator: bytes) -> Iterator[bytes | None]:
    """Yield what is between separators, None in place of what is larger than `LARGEST`."""
    overlap = len(separator) - 1
    held: list[bytes] = []
    size, tail = 0, b""
    for chunk in _lines_ended_by_newline(file):
        *ended, rest = (tail + chunk).split(separator)
        for end in ended:
            yield b"".join([*held, end]) if size + len(end) <= LARGEST else None
            held, size = [], 0
        cut = max(0, len(rest) - overlap)  # a separator may have begun behind it
        tail = rest[cut:]
        size += cut
        held = [*held, rest[:cut]] if size <= LARGEST else []
    yield b"".join([*held, tail]) if size + len(tail) <= LARGEST else None


def _lines_ended_by_newline(file: BufferedReader) -> Iterator[bytes]:
    waiting = b""
    while chunk := file.read(_CHUNK):
        chunk = waiting + chunk
        waiting = b"\r" if chunk.endswith(b"\r") else b""
        yield chunk[: len(chunk) - len(waiting)].replace(b"\r\n", b"\n")
    yield waiting
