"""Chrome traces on disk, read and written as a stream, compressed or not.

A trace in which every event begins on a separate line, as Kineto and `write_trace` lay them out,
is cut into blocks of whole events that orjson decodes. A block that was cut elsewhere is no JSON:
then, and for any other layout, ijson reads on, several times slower.
"""

import gzip
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import ijson
import orjson

from shardlab.core.errors import UserError

Event = dict[str, Any]

_BLOCK = 1 << 16
"""bytes of a block; larger ones hold more decoded events at once and are not faster"""
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST = re.compile(rb"\s*(\n[ \t]*)\{")
"""beginning of the first event, and the separator before each event"""


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a trace in the order of the file, in constant memory.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    done = 0
    with _refusing(path):
        try:
            with _open(path) as file:
                for events in _blocks(file):
                    yield from events
                    done += len(events)
        except orjson.JSONDecodeError:
            with _open(path) as file:
                others = ijson.items(file, "traceEvents.item", use_float=True)
                yield from islice(others, done, None)


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the top-level values before the events.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    with _refusing(path), _open(path) as file:
        head, _ = _split_head(file)
        header: dict[str, Any] = orjson.loads(head.rstrip().rstrip(b",") + b"}")
        return header


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Write one compressed JSON object: the header first, then one line per event."""
    with path.open("wb") as raw, _compressor(raw) as file:
        head = orjson.dumps(header, option=orjson.OPT_NON_STR_KEYS)
        file.write(head[:-1] + b', "traceEvents": [')
        separator = b"\n"
        for event in events:
            file.write(separator + orjson.dumps(event))
            separator = b",\n"
        file.write(b"\n]}\n")


def _blocks(file: IO[bytes]) -> Generator[list[Event], None, None]:
    """Yield the events in lists.

    Raises:
        orjson.JSONDecodeError: the trace has another layout, or is damaged.
    """
    _, rest = _split_head(file)
    first = _FIRST.match(rest)
    boundary = b"}," + (first[1] if first else b"") + b"{"
    while new := file.read(_BLOCK):
        rest += new
        cut = rest.rfind(boundary) if first else -1
        if cut >= 0:
            yield orjson.loads(b"[" + rest[: cut + 1] + b"]")
            rest = rest[cut + 2 :]
        elif not first:
            # another layout: decoding everything at once would take all memory
            raise orjson.JSONDecodeError("no event on a line of its own", "", 0)
    # the end of the file closes the object that the header opened
    yield orjson.loads(b'{"traceEvents":[' + rest)["traceEvents"]


def _split_head(file: IO[bytes]) -> tuple[bytes, bytes]:
    """Read the header before the events, and the beginning of the events read with it."""
    text = b""
    while True:
        new = file.read(_BLOCK)
        text += new
        begin = _BEGIN.search(text)
        if begin is not None:
            # enough to recognise the layout of the first event
            return text[: begin.start()], text[begin.end() :] + file.read(_BLOCK)
        if not new:
            raise orjson.JSONDecodeError("no traceEvents", "", 0)


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    """Turn errors of reading into one line that names the fix."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such trace: run the train stage first") from None
    except (
        orjson.JSONDecodeError,
        ijson.JSONError,
        EOFError,
        gzip.BadGzipFile,
        UnicodeDecodeError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole trace ({reason}): trace the run again") from None


def _compressor(raw: IO[bytes]) -> gzip.GzipFile:
    # no name and time in the gzip header, so that equal traces are equal files
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)


@contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    with Path(path).open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0, os.SEEK_SET)
        if compressed:
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        else:
            yield raw
