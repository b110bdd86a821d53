"""From a JSON array to token shards, compared with other readers and tokenizers.

    make rivals
    python -m benchmarks.ingestion [--mb SIZE] [--repetitions R] [--data FOLDER] [--rivals FOLDER]
                                   [--out FOLDER]

The pipeline's corpus is repeated with other titles until it is as large as asked for, and encoded
with GPT-2's tokenizer to uint16. Every way has a process of its own and all take turns; the fastest
repetition counts. Ours also validates records, splits, plans and hashes; the others do not. Where
other work shares the CPUs, CPU seconds say more than the rate does.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from benchmarks.usage import HEADINGS, fastest_usage, print_usage
from shardlab.data.corpus_file import CorpusDocument, read_corpus, write_corpus
from shardlab.data.tokenizer import pretrained_tokenizer

_BATCH = 1000
_DOWNLOADS = Path(".work")


def main() -> None:
    from benchmarks.common import DATA, RIVAL_PACKAGES, arguments, publish, text_table
    from shardlab.core.numbers import figure

    args = arguments(
        __doc__,
        mb=(1000.0, "size of the corpus in 10^6 bytes"),
        repetitions=3,
        data=DATA,
        rivals=RIVAL_PACKAGES,
    )
    with tempfile.TemporaryDirectory(prefix="shardlab-ingestion-") as folder:
        corpus = Path(folder, "large.json")
        write_corpus(corpus, repeated(args.data / "corpus.json", args.mb * 1e6))
        size = corpus.stat().st_size / 1e6
        words = [str(corpus), str(args.rivals)]
        usages = fastest_usage("benchmarks.ingestion", WAYS, words, args.repetitions)
    ours = usages["shardlab"].seconds
    rows = [
        [way, figure(size / usage.seconds), figure(ours / usage.seconds), *usage.cells()]
        for way, usage in usages.items()
    ]
    headings = ["way", "MB per second", "times our speed", *HEADINGS]
    table = text_table(f"{size:.0f} MB of JSON", headings, rows)
    publish(__doc__, args.out / "ingestion.md", table)


def repeated(path: Path, size: float) -> Iterator[CorpusDocument]:
    """Yield the documents again and again with other titles, until they have `size` bytes."""
    written = 0
    for turn in count():
        for document in read_corpus(path):
            if written >= size:
                return
            later = document._replace(id=f"{turn}-{document.id}", title=f"{document.title} {turn}")
            written += later.size
            yield later


def shardlab(corpus: Path, out: Path) -> None:
    """Run both data stages, with as many shards as there are CPUs."""
    from shardlab.data.settings import Data, Tokenize
    from shardlab.data.sources import prepare
    from shardlab.data.tokenize import build_tokens
    from shardlab.data.workers import usable_cores

    prepare(Data(source="json", path=str(corpus)), out / "corpus.json", _DOWNLOADS)
    options = Tokenize(tokenizer="gpt2", vocabulary=None, shards=usable_cores())
    build_tokens(out / "corpus.json", 0.02, options, _DOWNLOADS, out)


def tokenizers(corpus: Path, out: Path) -> None:
    """Read by ijson and encode by tokenizers, in threads."""
    encode = pretrained_tokenizer("gpt2", _DOWNLOADS).encode
    _write(out, (ids for batch in _texts(corpus) for ids in encode(batch)))


def gigatoken(corpus: Path, out: Path) -> None:
    """Read by ijson and encode by gigatoken, in threads."""
    from gigatoken import Tokenizer

    # without added tokens, which it would recognize inside of texts
    plain = json.loads(pretrained_tokenizer("gpt2", _DOWNLOADS).to_json()) | {"added_tokens": []}
    encode = Tokenizer.from_json(json.dumps(plain)).encode_batch_list
    _write(out, (ids for batch in _texts(corpus) for ids in encode(batch)))


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "shardlab": shardlab,
    "ijson, tokenizers": tokenizers,
    "ijson, gigatoken": gigatoken,
}


def _texts(corpus: Path) -> Iterator[list[str]]:
    import ijson

    with corpus.open("rb") as file:
        records = ijson.get_backend("yajl2_c").items(file, "item", use_float=True)
        texts = (f"{record['title']}\n{record['text']}" for record in records)
        while batch := list(islice(texts, _BATCH)):
            yield batch


def _write(out: Path, tokens: Iterator[list[int]]) -> None:
    with (out / "tokens.bin").open("wb") as file:
        for ids in tokens:
            file.write(np.array([*ids, 50256], np.uint16).tobytes())


def _run(way: str, corpus: Path, rivals: str) -> None:
    sys.path.append(rivals)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        print_usage(partial(WAYS[way], corpus, Path(folder)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
