"""Articles of a MediaWiki XML dump as plain prose, parsed in parallel, in the order of the dump."""

import bz2
import re
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from itertools import islice
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
from shardlab.data.workers import usable_cores, worker_pool

_LARGEST_PAGE = 2 << 20
"""characters; MediaWiki refuses larger pages ($wgMaxArticleSize)"""


class _Article(NamedTuple):
    id: str
    title: str
    text: str
    """markup, then prose"""


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
    articles = _articles(_pages(file, name), tally)
    with worker_pool(cores) as pool:
        while some := list(islice(articles, 16 * cores)):  # map itself would read all of them
            for article, kind in pool.map(_strip, some):
                if kind is None:
                    yield Document(*article)
                else:
                    tally.bad(f"page {article.id} ({article.title[:60]!r})", kind)


def _pages(file: BinaryIO | BufferedIOBase, name: str) -> Iterator[tuple[ElementTree.Element, str]]:
    """Yield the pages of a dump, each with the text of its last revision."""
    pages, text = 0, ""
    root = None
    try:
        for event, element in ElementTree.iterparse(file, ["start", "end"]):
            tag = element.tag.rpartition("}")[2]
            if root is None:
                root = element
                if tag != "mediawiki":
                    raise ElementTree.ParseError(f"it begins with <{tag[:40]}>")
            elif event == "end" and tag == "revision":
                text = element.findtext("{*}text") or ""
                element.clear()  # a page may have thousands
            elif event == "end" and tag == "page":
                pages += 1
                yield element, text
                text = ""
                root.clear()
    # LookupError, ValueError: an encoding that Python or expat does not know
    except (ElementTree.ParseError, LookupError, ValueError, EOFError, OSError) as error:
        raise UserError(
            f"{name}: page {pages + 1}: not a whole MediaWiki dump "
            f"({' '.join(str(error).split())[:100]}); fetch the file again"
        ) from None


def _articles(pages: Iterator[tuple[ElementTree.Element, str]], tally: Tally) -> Iterator[_Article]:
    for number, (page, markup) in enumerate(pages, start=1):
        title = page.findtext("{*}title", "").replace("_", " ")
        if page.find("{*}redirect") is not None:
            tally.leave_out("redirect")
        elif page.findtext("{*}ns", "0") != "0":
            tally.leave_out("not in the article namespace")
        elif not title.strip() or not markup:
            tally.bad(f"page number {number}", "no text" if title.strip() else "no title")
        elif len(markup) > _LARGEST_PAGE:
            tally.bad(f"page number {number}", f"text larger than {_LARGEST_PAGE >> 20} MiB")
        else:
            yield _Article(page.findtext("{*}id", str(number)), title, markup)


def _strip(article: _Article) -> tuple[_Article, str | None]:
    """Return an article with prose in place of markup, and the kind of bad record that it is."""
    try:
        text = plain_text(article.text)
    except (ParserError, RecursionError):
        return article._replace(text=""), "markup cannot be parsed"
    return article._replace(text=text), None if text else "empty text"


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
        ParserError, RecursionError: the parser cannot read the markup.
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
    prose = [node for node in nodes if not _is_furniture(node)]
    for node in prose:
        if isinstance(node, Tag) and node.contents is not None:
            node.contents.nodes = _without_furniture(node.contents.nodes)
    return prose


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
