"""All sources under one contract: documents in order, and a tally of bad records."""

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.core.errors import UserError
from shardlab.core.progress import track
from shardlab.data.corpus.corpus_file import write_corpus
from shardlab.data.corpus.document import Document, Tally, to_documents
from shardlab.data.sources import wikipedia
from shardlab.data.sources.huggingface import read_huggingface
from shardlab.data.sources.json_array import read_json_array
from shardlab.data.sources.json_lines import read_json_lines
from shardlab.data.sources.mediawiki import read_mediawiki
from shardlab.data.sources.synthetic import generate
from shardlab.experiment.schema import Data

_SYNTHETIC_DOCUMENTS = 2000


class Source(NamedTuple):
    """Name, licence and origin of a source."""

    name: str
    licence: str
    attribution: str
    url: str | None


def prepare(data: Data, corpus: Path, work: Path) -> dict[str, Any]:
    """Write the corpus file and return its description: source, licence, counts.

    Args:
        work: folder for downloads.

    Raises:
        UserError: the source cannot be read, or holds a bad record and those are refused; the
            corpus file is then as it was.
    """
    source = describe(data)
    tally = Tally(data.bad_records, data.path or data.source)
    # every source is a generator, whose files are to be closed also after an error
    source_documents = cast(Generator[Document], read_documents(data, work, tally))
    with closing(source_documents) as documents:
        limited = islice(documents, data.documents)
        size = write_corpus(corpus, track(limited, "documents", data.documents, " documents"))
    return {**source._asdict(), **size._asdict(), **tally.as_json()}


def read_documents(data: Data, work: Path, tally: Tally) -> Iterator[Document]:
    """Yield the documents of a source in order, in constant memory."""
    if data.source == "wikipedia":
        return wikipedia.read_wikipedia(work, tally)
    if data.source == "synthetic":
        return generate(data.documents or _SYNTHETIC_DOCUMENTS)
    assert data.path is not None  # ensured by the schema
    if data.source == "huggingface":
        return to_documents(read_huggingface(data.path), tally)
    path = Path(data.path)
    if not path.is_file():
        raise UserError(f"data.path {data.path!r}: no such file")
    if data.source == "json":
        return to_documents(read_json_array(path), tally)
    if data.source == "jsonl":
        return to_documents(read_json_lines(path, tally), tally)
    return read_mediawiki(path, tally)


def describe(data: Data) -> Source:
    """Return name, licence and origin; the licence of a file is unknown."""
    if data.source == "wikipedia":
        return Source("wikipedia", wikipedia.LICENCE, wikipedia.ATTRIBUTION, wikipedia.URL)
    if data.source == "synthetic":
        return Source("synthetic", "none needed", "Generated words; no one's text.", None)
    name = Path(data.path or "").name if data.source != "huggingface" else str(data.path)
    return Source(f"{data.source}: {name}", "not stated", f"Given by the user: {name}", None)
