"""Chrome traces on disk, read and written as a stream, compressed or not.

A trace in which every event begins on a separate line, as Kineto and `write_trace` lay them out,
is cut into blocks of whole events that orjson decodes. A block that was cut elsewhere is no JSON:
then, and for any other layout, events are decoded one by one, several times slower.

Time and memory are bounded by the size of the file, whatever is in it.
"""

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import orjson

from shardlab.core.errors import UserError

Event = dict[str, Any]

_BLOCK = 1 << 16
"""bytes of a block; larger ones hold more decoded events at once and are not faster"""
_LONGEST = 1 << 24
"""bytes of the header or of an event; longer ones are none of a profiler's"""
_MOST, _EXPANSION = 1 << 24, 64
"""bytes that any trace may have, and how many times larger it may be than when compressed; those
of profilers are 10 to 30 times larger"""
_LONGEST_GAP = 1 << 10
_GAP = re.compile(r"[\s,]*")
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST = re.compile(rb"\s*(\n[ \t]*)\{")
"""beginning of the first event, and the separator before each event"""


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a trace in the order of the file, in constant memory.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    done = 0
    with refusing(path):
        try:
            with _open(path) as file:
                for events in _blocks(file):
                    yield from events
                    done += len(events)
        except orjson.JSONDecodeError:
            with _open(path) as file:
                yield from islice(_one_by_one(file), done, None)


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the top-level values before the events.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    with refusing(path), _open(path) as file:
        head, _ = _split_head(file)
        header = orjson.loads(head.rstrip().rstrip(b",") + b"}")
        if not isinstance(header, dict):
            raise TypeError("no JSON object")
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
        if len(rest) > _LONGEST:
            raise ValueError(f"an event of more than {_LONGEST >> 20} MiB")
        # what was there before holds no boundary
        cut = rest.rfind(boundary, max(0, len(rest) - len(new) - len(boundary))) if first else -1
        if cut >= 0:
            yield orjson.loads(b"[" + rest[: cut + 1] + b"]")
            rest = rest[cut + 2 :]
        elif not first:
            # another layout: decoding everything at once would take all memory
            raise orjson.JSONDecodeError("no event on a line of its own", "", 0)
    # the end of the file closes the object that the header opened
    yield orjson.loads(b'{"traceEvents":[' + rest)["traceEvents"]


def _one_by_one(file: IO[bytes]) -> Iterator[Event]:
    """Yield the events of any layout."""
    decode, to_text = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")().decode
    text, place, size = to_text(_split_head(file)[1]), 0, _BLOCK
    while not text.startswith("]", place := _end_of_gap(text, place)):
        try:
            event, place = decode(text, place)
        except json.JSONDecodeError:
            new = file.read(size)
            if not new or len(text) - place > _LONGEST:
                raise
            # twice as much each time, so that a long event is not decoded from its start too often
            text, place, size = text[place:] + to_text(new), 0, 2 * size
        else:
            yield event
            size = _BLOCK
    # the end of the file closes the object that the header opened
    json.loads('{"traceEvents":[' + text[place:] + to_text(file.read(_LONGEST), final=True))


def _end_of_gap(text: str, place: int) -> int:
    found = _GAP.match(text, place)
    return place if found is None else found.end()


def _split_head(file: IO[bytes]) -> tuple[bytes, bytes]:
    """Read the header before the events, and the beginning of the events read with it."""
    text = b""
    while len(text) <= _LONGEST and (new := file.read(_BLOCK)):
        searched = max(0, len(text) - _LONGEST_GAP)
        text += new
        begin = _BEGIN.search(text, searched)
        if begin is not None:
            # enough to recognise the layout of the first event
            return text[: begin.start()], text[begin.end() :] + file.read(_BLOCK)
    raise ValueError("no traceEvents")


@contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turn errors of reading a trace, or of what it says, into one line that names the fix."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such trace: run the train stage first") from None
    except (*_DAMAGED, *_HOSTILE) as error:
        reason = " ".join(str(error).split())[:100]
        if isinstance(error, _HOSTILE):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(f"{path}: not a whole trace ({reason}): trace the run again") from None


_DAMAGED = EOFError, OSError, ValueError, zlib.error
"""ValueError: of JSON, UTF-8, large numbers"""
_HOSTILE = ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError
"""of values that are absent, or of other types than a profiler writes"""


def _compressor(raw: IO[bytes]) -> gzip.GzipFile:
    # no name and time in the gzip header, so that equal traces are equal files
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)


@contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    with Path(path).open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0, os.SEEK_SET)
        if compressed:
            with _Bounded(raw) as file:
                yield file  # type: ignore[misc]
        else:
            yield raw


class _Bounded(gzip.GzipFile):
    """Reader that refuses to expand a small file to a large one."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw)
        self._most = max(_MOST, _EXPANSION * os.fstat(raw.fileno()).st_size)

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        if self.tell() > self._most:
            raise ValueError(f"more than {self._most >> 20} MiB when decompressed")
        return content
