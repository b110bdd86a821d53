"""Articles of a MediaWiki XML dump as plain prose, parsed in parallel, in the order of the dump."""

import bz2
import re
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree.ElementTree import ParseError

import mwparserfromhell
import mwxml
from mwparserfromhell.nodes import Heading, Node, Tag, Template, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode
from mwxml.errors import MalformedXML

from shardlab.core.errors import UserError
from shardlab.data.corpus.corpus_file import Document
from shardlab.data.corpus.workers import map_in_order, usable_cores, worker_pool
from shardlab.data.sources.records import Tally


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


_APPENDICES = {
    "bibliography",
    "citations",
    "external links",
    "footnotes",
    "further reading",
    "notes",
    "notes and references",
    "references",
    "references and notes",
    "see also",
    "sources",
    "works cited",
}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*")
_TAGS = {"gallery", "imagemap", "math", "ref", "references", "score", "table", "timeline"}
_MEDIA = {"category", "file", "image", "media"}


def plain_text(markup: str) -> str:
    """Return headings and paragraphs, without templates, tables, references, pictures and
    appendices.

    Raises:
        mwparserfromhell.parser.ParserError: markup that the parser cannot read.
    """
    nodes = _without_appendices(mwparserfromhell.parse(markup).nodes)
    text = Wikicode(_without_furniture(nodes)).strip_code()
    text = re.sub(r" ?\([\s,;:]*\)", "", text)  # where a pronunciation was dropped
    lines = (line.strip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _without_appendices(nodes: list[Node]) -> Iterator[Node]:
    skipped_level = 0  # level of the current appendix
    for node in nodes:
        if isinstance(node, Heading) and (not skipped_level or node.level <= skipped_level):
            appendix = str(node.title.strip_code()).strip().lower() in _APPENDICES
            skipped_level = node.level if appendix else 0
        if not skipped_level:
            yield node


def _without_furniture(nodes: Iterable[Node]) -> list[Node]:
    kept = [node for node in nodes if not _is_furniture(node)]
    for node in kept:
        if isinstance(node, Tag) and node.contents is not None:
            node.contents.nodes = _without_furniture(node.contents.nodes)
    return kept


def _is_furniture(node: Node) -> bool:
    if isinstance(node, Template):
        return True
    if isinstance(node, Tag):
        return str(node.tag).strip().lower() in _TAGS
    if isinstance(node, Wikilink):
        prefix, colon, _ = str(node.title).partition(":")
        prefix = prefix.strip()
        return bool(colon) and (prefix.lower() in _MEDIA or bool(_LANGUAGE.fullmatch(prefix)))
    return False
