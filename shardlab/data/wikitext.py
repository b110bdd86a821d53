"""Plain prose of MediaWiki markup."""

import re
from collections.abc import Iterable, Iterator

import mwparserfromhell
from mwparserfromhell.definitions import is_single
from mwparserfromhell.nodes import Heading, Node, Tag, Template, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

LARGEST_PAGE = 2 << 20
"""characters; MediaWiki refuses larger pages ($wgMaxArticleSize)"""

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
_MOST_WORK = 20_000_000
"""open brackets and tags times characters: the parser goes back to each that nothing closes"""
_BRACKET = re.compile(
    r"<(/?)([a-z]\w*)(?=([^<>]*+>)?)|(<!--|\{\{|\{\||\[)|(-->|\}\}|\|\}|\])", re.I
)
_OPENS = {"-->": "<!--", "}}": "{{", "|}": "{|", "]": "["}


class TooComplex(ValueError):
    """Markup that the parser would need too much time or memory for, or cannot read."""


def plain_text(markup: str) -> str:
    """Return headings and paragraphs, without templates, tables, references, pictures and
    appendices.

    Raises:
        TooComplex: markup that would take over about 5 s or 300 MB, or cannot be read at all.
    """
    if sum(map(markup.count, _MARKS)) > _MOST_MARKS:
        raise TooComplex(f"over {_MOST_MARKS} marks")
    if _open_brackets(markup) * len(markup) > _MOST_WORK:
        raise TooComplex("too many brackets or tags that nothing closes")
    try:
        return _prose(markup)
    except (ParserError, RecursionError):
        raise TooComplex("markup cannot be parsed") from None


def _open_brackets(markup: str) -> int:
    """Return the largest number of brackets and tags that are open at once.

    One that closes another than the last one counts for nothing, as for the parser.
    """
    stack: list[str] = []
    most = 0
    for end_tag, tag, rest, opening, closing in _BRACKET.findall(markup):
        whole = rest and (end_tag or rest.endswith("/>") or is_single(tag))
        if opening or (tag and not whole):
            stack.append(opening or tag.lower())
            most = max(most, len(stack))
        elif stack and stack[-1] == (_OPENS[closing] if closing else end_tag and tag.lower()):
            stack.pop()
    return most


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
