"""Articles of a MediaWiki XML dump as plain prose, parsed in parallel, in the order of the dump."""

import bz2
import re
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

import mwparserfromhell
from mwparserfromhell.nodes import Heading, Node, Tag, Template, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import Document
from shardlab.data.source_records import Tally
from shardlab.data.workers import map_in_order, usable_cores, worker_pool

_LARGEST_PAGE = 2 << 20
"""characters; MediaWiki refuses larger pages ($wgMaxArticleSize)"""


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
    with worker_pool(cores) as pool:
        for page, text, kind in map_in_order(pool, _strip, pages, 4 * cores):
            if kind is None:
                yield Document(page.id, page.title, text)
            else:
                tally.bad(f"page {page.id} ({page.title[:60]!r})", kind)


def _strip(page: _Page) -> tuple[_Page, str, str | None]:
    """Return the page without its markup, its text, and the kind of bad record that it is."""
    try:
        text, kind = plain_text(page.markup), None
    except TooComplex as error:
        text, kind = "", str(error)
    return page._replace(markup=""), text, kind if text or kind else "empty text"


def _articles(pages: Iterator[dict[str, str]], tally: Tally) -> Iterator[_Page]:
    for number, page in enumerate(pages, start=1):
        title, markup = page["title"].replace("_", " "), page["text"]
        kind = None
        if not _is_whole(page["id"]) or not _is_whole(page["ns"]):
            kind = "id or namespace is no whole number"
        elif "redirect" in page:
            tally.leave_out("redirect")
        elif int(page["ns"]) != 0:
            tally.leave_out("not in the article namespace")
        elif not title.strip() or not markup:
            kind = "no text" if title.strip() else "no title"
        elif len(markup) > _LARGEST_PAGE:
            kind = f"text larger than {_LARGEST_PAGE >> 20} MiB"
        else:
            yield _Page(page["id"].strip(), title, markup)
        if kind is not None:
            tally.bad(f"page number {number}", kind)


def _is_whole(text: str) -> bool:
    return len(text) < 20 and text.strip().removeprefix("-").isdecimal()


def _pages(file: BinaryIO | BufferedIOBase, name: str) -> Iterator[dict[str, str]]:
    """Yield `id`, `ns`, `title` and `text` of each page, and `redirect` if it is one."""
    pages = 0
    namespaces: dict[str, str] = {}
    text = ""
    root = None
    try:
        for event, element in ElementTree.iterparse(file, ["start", "end"]):
            tag = element.tag.rpartition("}")[2]
            if root is None:
                root = element
                if tag != "mediawiki":
                    raise ElementTree.ParseError(f"it begins with <{tag[:40]}>")
            elif event == "end" and tag == "namespace":
                namespaces[element.text or ""] = element.get("key", "")
            elif event == "end" and tag == "revision":  # the last one stays
                text = element.findtext("{*}text") or ""
                element.clear()
            elif event == "end" and tag == "page":
                pages += 1
                yield _fields(element, namespaces) | {"text": text}
                text = ""
                root.clear()
    # LookupError, ValueError: an encoding that Python or expat does not know
    except (ElementTree.ParseError, LookupError, ValueError, EOFError, OSError) as error:
        raise UserError(
            f"{name}: page {pages + 1}: not a whole MediaWiki dump "
            f"({' '.join(str(error).split())[:100]}); fetch the file again"
        ) from None


def _fields(page: ElementTree.Element, namespaces: dict[str, str]) -> dict[str, str]:
    fields = {key: page.findtext(f"{{*}}{key}") or "" for key in ("id", "title")}
    prefix = fields["title"].partition(":")[0]
    # dumps before 2012 have no ns
    fields["ns"] = page.findtext("{*}ns", namespaces.get(prefix, "0"))
    return fields if page.find("{*}redirect") is None else fields | {"redirect": ""}


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

_MARKS = "<{[|*#:;'="
_MOST_MARKS = 200_000
"""characters with a meaning; the parser needs about a kilobyte for each"""
_PAIRS = [("{{", "}}"), ("[[", "]]"), ("{|", "|}")]
_MOST_OPEN = 1000
"""brackets that nothing closes; the parser goes back to each"""


class TooComplex(ValueError):
    """Markup that the parser would need too much memory or time for, or cannot read."""


def plain_text(markup: str) -> str:
    """Return headings and paragraphs, without templates, tables, references, pictures and
    appendices.

    Raises:
        TooComplex: markup that would take much memory or time, or cannot be read at all.
    """
    if sum(map(markup.count, _MARKS)) > _MOST_MARKS:
        raise TooComplex(f"over {_MOST_MARKS} marks")
    if any(markup.count(a) - markup.count(b) > _MOST_OPEN for a, b in _PAIRS):
        raise TooComplex(f"over {_MOST_OPEN} brackets that nothing closes")
    try:
        return _prose(markup)
    except (ParserError, RecursionError):
        raise TooComplex("markup cannot be parsed") from None


def _prose(markup: str) -> str:
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
