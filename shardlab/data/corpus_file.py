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
    """Title, or an empty text."""
    text: str

    @property
    def content(self) -> str:
        """Text for the model: title, newline, text; without a title only the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def split_key(self) -> str:
        """Text whose hash decides the split: the title, or the id if there is no title."""
        return self.title or self.id

    @property
    def size(self) -> int:
        """UTF-8 bytes of the content."""
        title = len(self.title.encode())
        return title + bool(title) + len(self.text.encode())


def write_corpus(path: Path, documents: Iterable[CorpusDocument]) -> dict[str, int]:
    """Write all documents to `path`, which does not change if an error occurs.

    Returns:
        number of `documents`, and `bytes` of their UTF-8 text with titles.
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
        UserError: The file is missing or damaged, or `write_corpus` did not write it.
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
            reason = "the part before it is not an array of documents"
            raise _damaged(path, file.tell(), reason) from None


class _JsonArray:
    """Lines from the position of the file to the byte `stop`, as a JSON array for ijson."""

    def __init__(self, file: BinaryIO, stop: int | None) -> None:
        self._file, self._stop = file, stop
        self._delimiter: bytes | None = b"["
        """Delimiter before the next document; None after the last document."""

    def read(self, size: int) -> bytes:
        array = io.BytesIO()
        while self._delimiter is not None and array.tell() < size:
            ended = self._stop is not None and self._file.tell() >= self._stop
            line = b"]\n" if ended else self._file.readline()
            if line == b"]\n":
                array.write(b"[]" if self._delimiter == b"[" else b"]")
                self._delimiter = None
            elif line:
                array.write(self._delimiter)
                array.write(line.removesuffix(b"\n").removesuffix(b","))
                self._delimiter = b","
            else:
                break  # the file lacks its last line, so the array has no end: ijson refuses it
        return array.getvalue()


def _damaged(path: Path, offset: int, reason: str) -> UserError:
    return UserError(f"{path}: byte {offset}: damaged ({reason}); make it again: shardlab prepare")
