"""Articles of a MediaWiki XML dump as plain prose, parsed in parallel, in the order of the dump."""

import bz2
import re
from collections.abc import Iterable, Iterator
from functools import partial
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
from shardlab.data.corpus_file import CorpusDocument
from shardlab.data.source_records import RecordCounts
from shardlab.data.workers import usable_cores, worker_pool

_LARGEST_PAGE = 2 << 20
"""Largest page in characters; MediaWiki refuses larger ones ($wgMaxArticleSize)."""


class Site(NamedTuple):
    """Names of a wiki for pictures, categories and appendices, in lower case.

    The English names hold in addition.
    """

    media: frozenset[str] = frozenset({"category", "file", "image", "media"})
    """Prefixes of links to pictures and categories, from the namespaces of `siteinfo`."""
    appendices: frozenset[str] = frozenset()
    """Headings of sections without prose, such as references."""


ENGLISH = Site()


class _Article(NamedTuple):
    id: str
    title: str
    text: str
    """Markup; prose once `_strip` has replaced it."""


def read_mediawiki(path: Path, counts: RecordCounts) -> Iterator[CorpusDocument]:
    """Yield the articles of an `.xml` or `.xml.bz2` file."""
    with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as file:
        yield from read_dump(file, str(path), counts)


def read_dump(
    file: BinaryIO | BufferedIOBase, name: str, counts: RecordCounts
) -> Iterator[CorpusDocument]:
    """Yield the articles of an uncompressed dump, without redirects and other namespaces.

    Only the last revision of a page is read. Templates are dropped; templates with a number, such
    as `{{convert|12|km}}`, are counted. Memory holds a few pages per core.

    Raises:
        UserError: The XML or the compressed data is malformed or ends early.
    """
    cores = usable_cores()
    site = [ENGLISH]
    articles = _articles(_pages(file, name, site), counts)
    with worker_pool(cores) as pool:
        while batch := list(islice(articles, 16 * cores)):  # pool.map reads all of its input
            for article, kind, numbers in pool.map(partial(_strip, site=site[0]), batch):
                for _ in range(numbers):
                    counts.add_left_out("number in a template")
                if kind is None:
                    yield CorpusDocument(*article)
                else:
                    counts.add_bad(f"page {article.id} ({article.title[:60]!r})", kind)


def _pages(
    file: BinaryIO | BufferedIOBase, name: str, site: list[Site]
) -> Iterator[tuple[ElementTree.Element, str]]:
    """Yield each page of a dump with the text of its last revision.

    Sets `site[0]` to the names of the dump before the first page.
    """
    pages, text = 0, ""
    root = None
    try:
        for event, element in ElementTree.iterparse(file, ["start", "end"]):
            tag = element.tag.rpartition("}")[2]
            if root is None:
                root = element
                if tag != "mediawiki":
                    raise ElementTree.ParseError(f"it begins with <{tag[:40]}>")
            elif event == "end" and tag == "siteinfo":
                site[0] = _site(root, element)
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
            f"{name}: page {pages + 1}: not a complete MediaWiki dump "
            f"({' '.join(str(error).split())[:100]}); give a complete .xml or .xml.bz2 file; "
            "unpack other formats first"
        ) from None


_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_SHOWN = ("-2", "6", "14")
"""Keys of the namespaces Media, File and Category."""


def _site(root: ElementTree.Element, siteinfo: ElementTree.Element) -> Site:
    spaces = siteinfo.iterfind("{*}namespaces/{*}namespace")
    media = {(space.text or "").lower() for space in spaces if space.get("key") in _SHOWN} - {""}
    language = root.get(_LANG, "en").partition("-")[0]
    return Site(ENGLISH.media | media, frozenset(_APPENDICES.get(language, ())))


def _articles(
    pages: Iterator[tuple[ElementTree.Element, str]], counts: RecordCounts
) -> Iterator[_Article]:
    for number, (page, markup) in enumerate(pages, start=1):
        title = page.findtext("{*}title", "").replace("_", " ")
        if page.find("{*}redirect") is not None:
            counts.add_left_out("redirect")
        elif page.findtext("{*}ns", "0") != "0":
            counts.add_left_out("not in the article namespace")
        elif not title.strip() or not markup:
            counts.add_bad(f"page number {number}", "no text" if title.strip() else "no title")
        elif len(markup) > _LARGEST_PAGE:
            counts.add_bad(f"page number {number}", f"text larger than {_LARGEST_PAGE >> 20} MiB")
        else:
            yield _Article(page.findtext("{*}id", str(number)), title, markup)


def _strip(article: _Article, site: Site) -> tuple[_Article, str | None, int]:
    """Return an article with prose in place of markup, the kind of bad record if it is one, and the
    number of dropped templates that show a number.
    """
    try:
        text, numbers = _prose(article.text, site)
    except (ParserError, RecursionError):
        return article._replace(text=""), "markup cannot be parsed", 0
    return article._replace(text=text), None if text else "empty text", numbers


_APPENDICES = {
    "en": (
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
    ),
    "de": (
        "anmerkungen",
        "belege",
        "einzelnachweise",
        "fußnoten",
        "literatur",
        "quellen",
        "siehe auch",
        "weblinks",
    ),
    "es": (
        "bibliografía",
        "enlaces externos",
        "fuentes",
        "notas",
        "referencias",
        "véase también",
    ),
    "fr": (
        "annexes",
        "bibliographie",
        "liens externes",
        "notes et références",
        "références",
        "voir aussi",
    ),
    "it": (
        "altri progetti",
        "bibliografia",
        "collegamenti esterni",
        "note",
        "voci correlate",
    ),
    "nl": (
        "bronnen",
        "externe links",
        "literatuur",
        "referenties",
        "zie ook",
    ),
    "pt": (
        "bibliografia",
        "ligações externas",
        "notas",
        "referências",
        "ver também",
    ),
}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*")
_TAGS = {"gallery", "imagemap", "math", "ref", "references", "score", "table", "timeline"}
# MediaWiki knows more names of the picture space than siteinfo lists, such as Bild beside Datei
_PICTURE = re.compile(
    r"\.(djvu|gif|jpe?g|mp3|og[agv]|pdf|png|svg|tiff?|wav|webm|webp|xcf)$", re.IGNORECASE
)
_NUMBER = re.compile(r"[\s+\u2212-]*\d[\d\s.,]*")


def plain_text(markup: str, site: Site = ENGLISH) -> str:
    """Return headings and paragraphs, without templates, tables, references and pictures, and
    without sections such as references and external links.

    Raises:
        ParserError, RecursionError: The parser cannot read the markup.
    """
    return _prose(markup, site)[0]


def _prose(markup: str, site: Site) -> tuple[str, int]:
    nodes = _without_appendices(mwparserfromhell.parse(markup).nodes, site)
    templates: list[Template] = []
    text = Wikicode(_without_furniture(nodes, site, templates)).strip_code()
    text = re.sub(r" ?\([\s,;:]*\)", "", text)  # parentheses around a dropped pronunciation
    lines = (line.strip() for line in text.splitlines())
    prose = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return prose, sum(map(_holds_number, templates))


def _holds_number(template: Template) -> bool:
    """Return whether a template shows a number: `{{convert|12|km}}`, `{{formatnum:12}}`."""
    values = [str(param.value) for param in template.params if not param.showkey]
    return any(map(_NUMBER.fullmatch, [str(template.name).rpartition(":")[2], *values]))


def _without_appendices(nodes: list[Node], site: Site) -> Iterator[Node]:
    appendices = site.appendices.union(_APPENDICES["en"])
    skipped_level = 0  # level of the current appendix
    for node in nodes:
        if isinstance(node, Heading) and (not skipped_level or node.level <= skipped_level):
            appendix = str(node.title.strip_code()).strip().lower() in appendices
            skipped_level = node.level if appendix else 0
        if not skipped_level:
            yield node


def _without_furniture(nodes: Iterable[Node], site: Site, templates: list[Template]) -> list[Node]:
    """Return the nodes of prose; append the templates among `nodes` to `templates`."""
    prose: list[Node] = []
    for node in nodes:
        if isinstance(node, Template):
            templates.append(node)
        if _is_furniture(node, site):
            continue
        if isinstance(node, Tag) and node.contents is not None:
            node.contents.nodes = _without_furniture(node.contents.nodes, site, templates)
        prose.append(node)
    return prose


def _is_furniture(node: Node, site: Site) -> bool:
    if isinstance(node, Template):
        return True
    if isinstance(node, Tag):
        return str(node.tag).strip().lower() in _TAGS
    if isinstance(node, Wikilink):
        prefix, colon, name = str(node.title).partition(":")
        prefix = prefix.strip()
        if not prefix or not colon:
            return False
        is_media = prefix.lower() in site.media or _PICTURE.search(name.strip())
        return bool(is_media or _LANGUAGE.fullmatch(prefix))
    return False
