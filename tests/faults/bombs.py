"""Files that want much memory or time: `python -m tests.faults.bombs [MB] [NAME ...]`.

Each goes through the data stages, in a folder of its own; MB is the size of the large ones. Fails
if a process takes more than 500 MB, or if a stage ends otherwise than well or with one line.
"""

import bz2
import gzip
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

LIMIT = 500_000_000
SECONDS = 1200
_ROOT = Path(__file__).parents[2]
_PARAMS = """
data: {source: %s, path: %s, bad_records: skip, validation_share: 0.5}
model: {preset: tiny}
tokenize: {tokenizer: train, vocabulary: 300, shards: 2}
"""
_GOOD = [b'{"id": "g%d", "title": "Good %d", "text": "some good text"}' % (i, i) for i in range(9)]
_PAGE = (
    b"<page><title>T%d</title><ns>0</ns><id>%d</id><revision><id>1</id><text>%b</text>"
    b"</revision></page>"
)
_PAGES = [_PAGE % (i, i, b"some good text") for i in range(9)]
_DUMP = b"<mediawiki><siteinfo></siteinfo>"
_MB = 1_000_000

Parts = Iterator[bytes]


def _repeated(unit: bytes, size: int) -> Parts:
    piece = unit * (_MB // len(unit))
    for _ in range(size // len(piece)):
        yield piece
    yield unit * (size % len(piece) // len(unit))


def _array(record: Callable[[int], Parts]) -> Callable[[int], Parts]:
    def parts(size: int) -> Parts:
        yield b"[" + b",\n".join(_GOOD) + b","
        yield from record(size)
        yield b"]"

    return parts


def _lines(record: Callable[[int], Parts]) -> Callable[[int], Parts]:
    def parts(size: int) -> Parts:
        yield b"\n".join([*_GOOD, b""])
        yield from record(size)

    return parts


def _record(unit: bytes, most: int = 1 << 62) -> Callable[[int], Parts]:
    def parts(size: int) -> Parts:
        yield b'{"title": "B", "text": "b", "more": "'
        yield from _repeated(unit, min(size, most))
        yield b'"}'

    return parts


def _document(unit: bytes, size: int) -> Callable[[int], Parts]:
    def parts(_: int) -> Parts:
        yield b'{"title": "Large", "text": "'
        yield from _repeated(unit, size)
        yield b'"}'

    return parts


def _values(unit: bytes, size: int) -> Callable[[int], Parts]:
    def parts(_: int) -> Parts:
        yield b'{"title": "V", "text": "v", "more": ['
        yield from _repeated(unit + b",", size)
        yield b"1]}"

    return parts


def _page(unit: bytes, most: int = 1 << 62) -> Callable[[int], Parts]:
    def parts(size: int) -> Parts:
        yield _DUMP + b"".join(_PAGES)
        before, after = (_PAGE % (10, 10, b"|")).split(b"|")
        yield before
        yield from _repeated(unit, min(size, most))
        yield after + b"</mediawiki>"

    return parts


def _xml(begin: bytes, unit: bytes) -> Callable[[int], Parts]:
    def parts(size: int) -> Parts:
        yield _DUMP + begin
        yield from _repeated(unit, size)

    return parts


def _distinct(size: int) -> Parts:
    letters = bytes.maketrans(b"0123456789", b"ghijklmnop")
    for number in range(size // 9000):
        words = (
            b"%08x" % (i * 2654435761 % 2**32) for i in range(number * 1000, 1000 + number * 1000)
        )
        text = b" ".join(words).translate(letters)
        yield b'{"title": "%d", "text": "%b"}\n' % (number, text)


def _parquet(text: str, rows: int, **layout: Any) -> Callable[[int], Parts]:
    def parts(_: int) -> Parts:
        import pyarrow
        import pyarrow.parquet

        texts = pyarrow.repeat(pyarrow.scalar(text, pyarrow.large_string()), rows)
        titles = [str(i) for i in range(rows)]
        file = io.BytesIO()
        table = pyarrow.table({"title": titles, "text": texts})
        pyarrow.parquet.write_table(table, file, compression="zstd", **layout)
        yield file.getvalue()

    return parts


_PROSE = b"It was a bright cold day in April, and the clocks were striking thirteen. "
BOMBS: dict[str, tuple[str, Callable[[int], Parts]]] = {
    "one-page.xml.bz2": ("mediawiki", _page(b"x")),
    "deep.xml": ("mediawiki", _xml(b"", b"<a>")),
    "long-tag.xml": ("mediawiki", _xml(b"<a b='", b"x")),
    "comment.xml": ("mediawiki", _xml(b"<!-- ", b"x")),
    "bold.xml": ("mediawiki", _page(b"&lt;b>", 60_000)),
    "attributes.xml": ("mediawiki", _page(b"&lt;b a=", 60_000)),
    "templates.xml": ("mediawiki", _page(b"{{a|", 60_000)),
    "crossed.xml": ("mediawiki", _page(b"{{a|[[b|}}]]", 60_000)),
    "rows.xml": ("mediawiki", _page(b"{|\n|-\n|", 2 * _MB)),
    "list.xml": ("mediawiki", _page(b"* a\n", 2 * _MB)),
    "brackets.json": ("json", _array(lambda _: _repeated(b"[", 40_000))),
    "brackets.jsonl": ("jsonl", _lines(lambda _: _repeated(b"[", 40_000))),
    "record.json": ("json", _array(_record(b"x"))),
    "backslashes.json": ("json", _array(_record(b"\\\\"))),
    "record.jsonl": ("jsonl", _lines(_record(b"x"))),
    "12-mb.json": ("json", _array(_record(b"x", 12 * _MB))),
    "objects.json": ("json", _array(_values(b'{"":1}', 16 * _MB))),
    "lists.jsonl": ("jsonl", _lines(_values(b"[]", 16 * _MB))),
    "strings.json": ("json", _array(_values(b'"ab"', 16 * _MB))),
    "document.json": ("json", _array(_document(_PROSE, 16 * _MB))),
    "escaped.json": ("json", _array(_document(b"\\u8a9e \\ud83d\\ude00", 16 * _MB))),
    "19-mb.jsonl": ("jsonl", _lines(_document(_PROSE, 19_600_000))),
    "record.jsonl.gz": ("jsonl", _lines(_record(b"x"))),
    "document.txt": ("text", lambda size: _repeated(b"x", size)),
    "lines.txt": ("text", lambda size: _repeated(b"a\n<|endoftext|>", min(size, 2 * _MB))),
    "page.parquet": (
        "huggingface",
        _parquet("x" * _MB, 1000, use_dictionary=False, write_batch_size=1000),
    ),
    "row-group.parquet": (
        "huggingface",
        _parquet("x" * 17 * _MB, 40, use_dictionary=False, write_batch_size=1),
    ),
    "dictionary.parquet": ("huggingface", _parquet("x" * 20 * _MB, 50)),
    "words.jsonl": ("jsonl", _lines(_distinct)),
    "word.json": ("json", _array(_document(b"x", 16 * _MB))),
}


class Outcome(NamedTuple):
    """End of the data stages: exit status, last line, and largest process in bytes."""

    status: int
    lines: list[str]
    peak: int
    seconds: float


def explode(name: str, size: int, folder: Path) -> Outcome:
    """Write a bomb and run prepare, and tokenize if that ends well."""
    source, parts = BOMBS[name]
    path = folder / name
    opened = {".bz2": bz2.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.writelines(parts(size))
    (folder / "params.yaml").write_text(_PARAMS % (source, name))
    outcome = _run("prepare", folder)
    if outcome.status:
        return outcome
    second = _run("tokenize", folder)
    return Outcome(
        second.status,
        outcome.lines[-1:] + second.lines,
        max(outcome.peak, second.peak),
        outcome.seconds + second.seconds,
    )


def _run(stage: str, folder: Path) -> Outcome:
    begun, peak = time.monotonic(), 0
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"stages.{stage}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stderr=errors,
        )
        while process.poll() is None and time.monotonic() - begun < SECONDS:
            peak = max(peak, _largest(process.pid))
            time.sleep(0.05)  # what is read is the highest so far
        process.kill()
        errors.seek(0)
        return Outcome(process.wait(), errors.read().splitlines(), peak, time.monotonic() - begun)


def _largest(pid: int) -> int:
    """Return the most that one process of a tree has had resident so far, in bytes."""
    try:
        tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return max(map(_high_water, tree))


def _high_water(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(s.split()[1]) * 1024 for s in status.splitlines() if s.startswith("VmHWM"))


def complaint(outcome: Outcome) -> str:
    """Return why an outcome is none of those allowed, or nothing."""
    if outcome.peak > LIMIT:
        return "too much memory"
    if outcome.status not in (0, 2) or any("Traceback" in line for line in outcome.lines):
        return f"ended with {outcome.status}"
    return "" if all(len(line) <= 300 for line in outcome.lines) else "a line over 300 characters"


def main(size: int, names: list[str]) -> None:
    """Print one row per bomb; exit with 1 if one of them did harm."""
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = explode(name, size, Path(folder))
            bytes_ = (Path(folder) / name).stat().st_size
        bad = complaint(outcome)
        failed = failed or bool(bad)
        figures = f"{bytes_ / _MB:9.2f} MB {outcome.peak / _MB:5.0f} MB resident"
        last = outcome.lines[-1] if outcome.lines else ""
        print(f"{name:18} {figures} {outcome.seconds:6.1f} s  {bad or 'ok'}: {last}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(int(float((sys.argv[1:2] or ["1000"])[0]) * _MB), sys.argv[2:] or list(BOMBS))
