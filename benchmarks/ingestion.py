"""From a JSON array to token shards, compared with other readers and tokenizers.

    make rivals
    python -m benchmarks.ingestion [--mb SIZE] [--repetitions R] [--data FOLDER] [--work FOLDER]
                                   [--rivals FOLDER]

The pipeline's corpus is repeated with other titles until it is as large as asked for, and encoded
with GPT-2's tokenizer to uint16. Every way has a process of its own and all take turns; the fastest
repetition counts. Ours also validates records, splits, plans and hashes; the others do not. Where
other work shares the CPUs, CPU seconds say more than the rate does.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.data.corpus_file import Document, read_corpus, write_corpus
from shardlab.data.tokenizer import given_tokenizer

_BATCH = 1000
_DOWNLOADS = Path(".work")


def main() -> None:
    from benchmarks.common import DATA, RIVAL_PACKAGES, WORK, arguments, print_table, write_results
    from shardlab.report.tables import figure

    args = arguments(
        __doc__,
        mb=(1000.0, "size of the corpus in 10^6 bytes"),
        repetitions=3,
        data=DATA,
        work=WORK,
        rivals=RIVAL_PACKAGES,
    )
    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shardlab-ingestion-") as folder:
        corpus = Path(folder, "large.json")
        write_corpus(corpus, repeated(args.data / "corpus.json", args.mb * 1e6))
        for _ in range(args.repetitions):
            for way in WAYS:
                found = _measured(way, corpus, args.rivals)
                if found and found["seconds"] < best.get(way, found)["seconds"] + 1e-9:
                    best[way] = found
        size = corpus.stat().st_size / 1e6
    write_results(args.work / "ingestion.json", mb=size, ways=best)
    ours = best["shardlab"]["seconds"]
    rows = [
        [
            way,
            *(figure(v) for v in (size / f["seconds"], ours / f["seconds"])),
            *(figure(f[key]) for key in ("cpu_seconds", "peak_mb")),
        ]
        for way, f in best.items()
    ]
    headings = ["way", "MB per second", "times our speed", "CPU seconds", "peak memory, MB"]
    print_table(f"{size:.0f} MB of JSON", headings, rows)


def repeated(path: Path, size: float) -> Iterator[Document]:
    """Yield the documents again and again with other titles, until they have `size` bytes."""
    written = 0
    for turn in count():
        for document, *_ in read_corpus(path):
            if written >= size:
                return
            later = document._replace(id=f"{turn}-{document.id}", title=f"{document.title} {turn}")
            written += later.size
            yield later


def _measured(way: str, corpus: Path, rivals: Path) -> dict[str, Any] | None:
    """Return the figures of a way in a process of its own, and none if its package is absent."""
    command = [sys.executable, "-m", "benchmarks.ingestion", "--run", way, str(corpus), str(rivals)]
    run = subprocess.run(command, capture_output=True, text=True)
    if "ModuleNotFoundError" in run.stderr:
        return None
    if run.returncode:
        raise RuntimeError(run.stderr)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def shardlab(corpus: Path, out: Path) -> None:
    """Run both data stages, with as many shards as there are CPUs."""
    from shardlab.config.model_and_data import Data, Tokenize
    from shardlab.data.sources import prepare
    from shardlab.data.tokenize import build_tokens
    from shardlab.data.workers import usable_cores

    prepare(Data(source="json", path=str(corpus)), out / "corpus.json", _DOWNLOADS)
    options = Tokenize(tokenizer="gpt2", vocabulary=None, shards=usable_cores())
    (out / "wheels").symlink_to((_DOWNLOADS / "wheels").absolute())
    build_tokens(out / "corpus.json", 0.02, options, out, out)


def tokenizers(corpus: Path, out: Path) -> None:
    """Read by ijson and encode by tokenizers, in threads."""
    encode = given_tokenizer("gpt2", _DOWNLOADS).encode
    _write(out, (ids for batch in _texts(corpus) for ids in encode(batch)))


def gigatoken(corpus: Path, out: Path) -> None:
    """Read by ijson and encode by gigatoken, in threads."""
    from gigatoken import Tokenizer

    # without added tokens, which it would recognize inside of texts
    found = json.loads(given_tokenizer("gpt2", _DOWNLOADS).to_json()) | {"added_tokens": []}
    encode = Tokenizer.from_json(json.dumps(found)).encode_batch_list
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
    """Print seconds, CPU seconds and memory of the largest process as JSON."""
    sys.path.append(rivals)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        begun = time.perf_counter()
        WAYS[way](corpus, Path(folder))
        seconds = time.perf_counter() - begun
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    # ru_maxrss of a process itself begins with that of its parent, which has imported torch
    status = Path("/proc/self/status").read_text()
    own = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    peak = max(own, used[1].ru_maxrss) * 1024 / 1e6
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
