"""Chrome traces on disk, read and written as a stream, compressed or not."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import ijson
import orjson
from ijson.common import ObjectBuilder

from shardlab.core.errors import UserError

Event = dict[str, Any]

_CHUNK = 1 << 18


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a trace in the order of the file, in constant memory.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    with refusing(path), _open(path) as file:
        yield from ijson.items(file, "traceEvents.item", use_float=True, buf_size=_CHUNK)


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the top-level values before the events.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    builder = ObjectBuilder()
    with refusing(path), _open(path) as file:
        for event, value in ijson.basic_parse(file, use_float=True):
            if (event, value) == ("map_key", "traceEvents"):
                header: dict[str, Any] = builder.value
                return header
            builder.event(event, value)
        raise ValueError("no traceEvents")


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Write one compressed JSON object: the header first, then one line per event."""
    # without name and time in the header of gzip, so that equal traces are equal files
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        head = orjson.dumps(header, option=orjson.OPT_NON_STR_KEYS)
        file.write(head[:-1] + b', "traceEvents": [')
        separator = b"\n"
        for event in events:
            file.write(separator + orjson.dumps(event))
            separator = b",\n"
        file.write(b"\n]}\n")


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


_DAMAGED = EOFError, OSError, ValueError, zlib.error, ijson.JSONError
"""ValueError: of UTF-8"""
_HOSTILE = ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError
"""of values that are absent, or of other types than a profiler writes"""


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
