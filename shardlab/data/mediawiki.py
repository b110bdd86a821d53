"""Pages of a MediaWiki XML dump, parsed in parallel, in the order of the dump."""

import bz2
import signal
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.parsers.expat import ExpatError, ParserCreate

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import Document
from shardlab.data.source_records import Tally
from shardlab.data.wikitext import LARGEST_PAGE, TooComplex, plain_text
from shardlab.data.workers import (
    WorkerKilled,
    map_in_order,
    usable_cores,
    worker_pool,
)


class _Page(NamedTuple):
    id: str
    title: str
    markup: str


def read_mediawiki(path: Path, tally: Tally) -> Iterator[Document]:
    """Yield the articles of an `.xml` or `.xml.bz2` file."""
    with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as file:
        yield from read_dump(file, str(path), tally)


def read_dump(file: BinaryIO | BufferedIOBase, name: str, tally: Tally) -> Iterator[Document]:
    """Yield the articles of an uncompressed dump, without redirects and other namespaces.

    Only the last revision of a page counts. Memory: some pages per core.

    Raises:
        UserError: XML or compressed data that is malformed or ends early, with the page.
    """
    cores = usable_cores()
    pages = _articles(_pages(file, name), tally)
    last = "the beginning"
    try:
        with worker_pool(cores) as pool:
            for page, text in map_in_order(pool, _strip, pages, 4 * cores):
                last = f"page {page.id}"
                if text:
                    yield Document(page.id, page.title, text)
                else:
                    tally.bad(f"page {page.id} ({page.title[:60]!r})", page.markup)
    except WorkerKilled:
        raise UserError(
            f"{name}: a worker process was killed at one of the {4 * cores} pages after {last}: "
            f"memory ran out, or its markup took over {_LONGEST_S} s to parse; remove that page"
        ) from None


def _strip(page: _Page) -> tuple[_Page, str]:
    """Return the text, or none and its complaint in the place of the markup."""
    # kills this process: the parser, in C, runs no handler before it is done
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S)
    try:
        return page._replace(markup="empty text"), plain_text(page.markup)
    except TooComplex as error:
        return page._replace(markup=str(error)), ""
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _articles(pages: Iterator[dict[str, str]], tally: Tally) -> Iterator[_Page]:
    for number, page in enumerate(pages, start=1):
        title, markup = page.get("title", "").replace("_", " "), page.get("text")
        kind = None
        if "large" in page:
            kind = f"{page['large']} larger than {LARGEST_PAGE >> 20} MiB"
        elif not _is_whole(page.get("id", "")) or not _is_whole(page["ns"]):
            kind = "id or namespace is no whole number"
        elif "redirect" in page:
            tally.leave_out("redirect")
        elif int(page["ns"]) != 0:
            tally.leave_out("not in the article namespace")
        elif not title.strip() or not markup:
            kind = "no text" if title.strip() else "no title"
        else:
            yield _Page(page["id"].strip(), title, markup)
        if kind is not None:
            tally.bad(f"page number {number}", kind)


def _is_whole(text: str) -> bool:
    return len(text) < 20 and text.strip().removeprefix("-").isdecimal()


_LONGEST_S = 60
"""CPU seconds for the markup of a page; a real one of the largest size needs about 10"""
_CHUNK = 1 << 16
_LONGEST_TAG = 1 << 20
_DEEPEST = 100
_NAMESPACES = 1000


def _pages(file: BinaryIO | BufferedIOBase, name: str) -> Iterator[dict[str, str]]:
    """Yield `id`, `ns`, `title` and `text` of each page, `redirect` if it is one, and `large` if
    a field was larger than `LARGEST_PAGE` and is left out."""
    parser = ParserCreate()
    dump = _Dump()
    parser.buffer_text = True
    parser.StartElementHandler = dump.start
    parser.EndElementHandler = dump.end
    parser.CharacterDataHandler = dump.characters
    chunk, error = b"-", None
    while chunk and error is None:
        try:
            chunk = file.read(_CHUNK)
            dump.unheard += len(chunk)
            parser.Parse(chunk, not chunk)
            if dump.unheard > _LONGEST_TAG:
                raise _NotADump(f"a tag or comment of over {_LONGEST_TAG >> 20} MiB")
        except (ExpatError, _NotADump, EOFError, OSError) as caught:
            error = caught
        yield from dump.take()  # the pages before a mistake are good
    if error is not None:
        raise UserError(
            f"{name}: page {dump.pages + 1}: not a whole MediaWiki dump "
            f"({' '.join(str(error).split())[:100]}); fetch the file again"
        )


class _NotADump(Exception):
    """XML that is not the export format of MediaWiki."""


_PAGE = ["mediawiki", "page"]
_FIELDS = [[*_PAGE, "title"], [*_PAGE, "ns"], [*_PAGE, "id"], [*_PAGE, "revision", "text"]]
_NAMESPACE = ["mediawiki", "siteinfo", "namespaces", "namespace"]


class _Dump:
    """Expat handlers that gather the fields of one page at a time."""

    def __init__(self) -> None:
        self.pages = 0
        self.unheard = 0
        """bytes since the parser called a handler"""
        self._path: list[str] = []
        self._page: dict[str, str] = {}
        self._done: list[dict[str, str]] = []
        self._field: list[str] | None = None
        """text of the current field in pieces; none outside of a field"""
        self._size = 0
        self._key = ""
        self._namespaces: dict[str, str] = {}

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.unheard = 0
        self._path.append(tag)
        if self._path[0] != "mediawiki" or len(self._path) > _DEEPEST:
            raise _NotADump(f"<{tag[:40]}> inside of {len(self._path) - 1} others")
        if self._path == _PAGE:
            self._page = {}
        elif self._path == [*_PAGE, "redirect"]:
            self._page["redirect"] = ""
        elif self._path in _FIELDS or self._path == _NAMESPACE:
            self._field, self._size = [], 0
            self._key = attributes.get("key", "")

    def characters(self, text: str) -> None:
        self.unheard = 0
        if self._field is not None:
            self._size += len(text)
            if self._size <= LARGEST_PAGE:
                self._field.append(text)

    def end(self, tag: str) -> None:
        self.unheard = 0
        if self._field is not None and (self._path in _FIELDS or self._path == _NAMESPACE):
            self._finish(tag, "".join(self._field))
            self._field = None
        elif self._path == _PAGE:
            self.pages += 1
            if "ns" not in self._page:  # dumps before 2012
                prefix, _, _ = self._page.get("title", "").partition(":")
                self._page["ns"] = self._namespaces.get(prefix, "0")
            self._done.append(self._page)
        self._path.pop()

    def _finish(self, tag: str, text: str) -> None:
        if tag == "namespace":
            if len(self._namespaces) < _NAMESPACES:
                self._namespaces[text] = self._key
            return
        if self._page.get("large") == tag:  # of an earlier revision
            del self._page["large"]
        if self._size > LARGEST_PAGE:
            self._page["large"] = tag
            text = ""
        self._page[tag] = text

    def take(self) -> list[dict[str, str]]:
        """Return the pages that are complete, once."""
        done, self._done = self._done, []
        return done
