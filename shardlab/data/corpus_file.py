"""The corpus file: a JSON array with one document per line."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from shardlab.core.errors import UserError
from shardlab.core.files import atomic

_LINE = b'{"id": %b, "title": %b, "text": %b}'


class Document(NamedTuple):
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


def write_corpus(path: Path, documents: Iterable[Document]) -> dict[str, int]:
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


def read_corpus(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """Yield the documents whose lines begin between bytes `start` and `stop`.

    Raises:
        UserError: the file is absent, damaged or not written by `write_corpus`.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is none; make it: python -m stages.prepare")
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)  # a line that begins at `start` follows a line end
            file.readline()
        elif file.readline() != b"[\n":
            raise _damaged(path, 0, "it does not begin as stages.prepare writes it")
        while stop is None or file.tell() < stop:
            offset = file.tell()
            line = file.readline()
            if line == b"]\n":
                return
            yield _document(path, offset, line)


def _document(path: Path, start: int, line: bytes) -> Document:
    try:
        return Document(**orjson.loads(line.rstrip(b",\n")))
    except (ValueError, TypeError):
        raise _damaged(path, start, "this line is no document") from None


def _damaged(path: Path, offset: int, reason: str) -> UserError:
    return UserError(
        f"{path}: byte {offset}: damaged ({reason}); make it again: python -m stages.prepare"
    )
