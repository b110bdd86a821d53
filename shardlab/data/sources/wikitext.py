"""Conversion of MediaWiki markup to plain prose."""

import re
from collections.abc import Iterable, Iterator

import mwparserfromhell
from mwparserfromhell.nodes import Heading, Node, Tag, Template, Wikilink
from mwparserfromhell.wikicode import Wikicode

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
    text = re.sub(r" ?\([\s,;:]*\)", "", text)  # left behind by a dropped pronunciation
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
