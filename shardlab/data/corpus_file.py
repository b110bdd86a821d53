"""The corpus file: a JSON array with one document per line."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ijson
import orjson

from shardlab.core.errors import UserError
from shardlab.core.files import atomic

_LINE = b'{"id": %b, "title": %b, "text": %b}'


class CorpusDocument(NamedTuple):
    """One document of a corpus."""

    id: str
    title: str
    """empty if it has none"""
    text: str

    @property
    def content(self) -> str:
        """Text for the model: title, newline, text; or the text alone."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def split_key(self) -> str:
        """Text whose hash decides the split: the title, or the id of a document without one."""
        return self.title or self.id

    @property
    def size(self) -> int:
        """UTF-8 bytes of the content."""
        title = len(self.title.encode())
        return title + bool(title) + len(self.text.encode())


def write_corpus(path: Path, documents: Iterable[CorpusDocument]) -> dict[str, int]:
    """Write all documents, or leave `path` as it is.

    Returns:
        `documents`, their number, and `bytes` of their UTF-8 text, titles included.
    """
    count = size = 0
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.write(b"[")
        for document in documents:
            file.write(b",\n" if count else b"\n")
            file.write(_LINE % tuple(map(orjson.dumps, document)))
            count += 1
            size += document.size
        file.write(b"\n]\n")
    return {"documents": count, "bytes": size}


def read_corpus(path: Path, start: int = 0, stop: int | None = None) -> Iterator[CorpusDocument]:
    """Yield the documents whose lines begin between bytes `start` and `stop`, in constant memory.

    Raises:
        UserError: the file is absent, damaged or not written by `write_corpus`.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is none; make it: shardlab prepare")
    with path.open("rb") as file:
        if file.readline() != b"[\n":
            raise _damaged(path, 0, "it does not begin as shardlab prepare writes it")
        if start > file.tell():
            file.seek(start - 1)  # a line that begins at `start` follows a line end
            file.readline()
        try:
            for record in ijson.items(_JsonArray(file, stop), "item"):
                yield CorpusDocument(**record)
        except (ijson.JSONError, UnicodeDecodeError, TypeError):
            reason = "what is before it is no array of documents"
            raise _damaged(path, file.tell(), reason) from None


class _JsonArray:
    """Lines of the file from where it stands up to the byte `stop`, as an array for ijson."""

    def __init__(self, file: BinaryIO, stop: int | None) -> None:
        self._file, self._stop = file, stop
        self._before: bytes | None = b"["
        """what stands before the next document; None after the last one"""

    def read(self, size: int) -> bytes:
        read = io.BytesIO()
        while self._before is not None and read.tell() < size:
            ended = self._stop is not None and self._file.tell() >= self._stop
            line = b"]\n" if ended else self._file.readline()
            if line == b"]\n":
                read.write(b"[]" if self._before == b"[" else b"]")
                self._before = None
            elif line:
                read.write(self._before)
                read.write(line.removesuffix(b"\n").removesuffix(b","))
                self._before = b","
            else:
                break  # a file without its last line: an array without its end
        return read.getvalue()


def _damaged(path: Path, offset: int, reason: str) -> UserError:
    return UserError(f"{path}: byte {offset}: damaged ({reason}); make it again: shardlab prepare")
