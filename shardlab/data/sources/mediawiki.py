"""Articles of a MediaWiki XML dump, parsed in parallel, in the order of the dump."""

import bz2
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree.ElementTree import ParseError

import mwxml
from mwparserfromhell.parser import ParserError
from mwxml.errors import MalformedXML

from shardlab.core.errors import UserError
from shardlab.data.corpus.document import Document, Tally
from shardlab.data.corpus.workers import map_in_order, usable_cores, worker_pool
from shardlab.data.sources.wikitext import plain_text


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
    with worker_pool(cores) as pool:
        for page, text in map_in_order(pool, _strip, _pages(file, name, tally), 4 * cores):
            if text is None:
                tally.bad(f"page {page.id} ({page.title!r})", "markup cannot be parsed")
            elif not text:
                tally.bad(f"page {page.id} ({page.title!r})", "empty text")
            else:
                yield Document(page.id, page.title, text)


def _strip(page: _Page) -> tuple[_Page, str | None]:
    try:
        return page._replace(markup=""), plain_text(page.markup)
    except (ParserError, RecursionError):
        return page._replace(markup=""), None


def _pages(file: BinaryIO | BufferedIOBase, name: str, tally: Tally) -> Iterator[_Page]:
    count = 0
    try:
        for page in mwxml.Dump.from_file(file).pages:
            count += 1
            markup = None
            for revision in page:
                markup = revision.text
            if page.redirect is not None:
                tally.leave_out("redirect")
            elif page.namespace not in (0, None):
                tally.leave_out("not in the article namespace")
            elif not page.title or not markup:
                tally.bad(f"page {page.id}", "no text" if page.title else "no title")
            else:
                yield _Page(str(page.id), page.title, markup)
    except (ParseError, MalformedXML, EOFError, OSError) as error:
        raise UserError(
            f"{name}: page {count + 1}: not a whole MediaWiki dump "
            f"({' '.join(str(error).split())[:200]}); fetch the file again"
        ) from None
