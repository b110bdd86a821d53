"""Chrome traces on disk: read and written as a stream, compressed or not."""

import gzip
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import ijson

from shardlab.core.errors import UserError

Event = dict[str, Any]


def read_items(path: str | Path, prefix: str) -> Generator[Any, None, None]:
    """The values at `prefix` (in ijson's notation), one at a time, in constant memory.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    try:
        with _open(Path(path)) as file:
            yield from ijson.items(file, prefix, use_float=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such trace: run the train stage first") from None
    except (ijson.JSONError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole trace ({reason}): trace the run again") from None


def read_events(path: str | Path) -> Iterator[Event]:
    """The events of a trace, in the order of the file."""
    return read_items(path, "traceEvents.item")


def read_header(path: str | Path, key: str, default: Any) -> Any:
    """The value of a top-level key; the file is read only as far as that key."""
    with closing(read_items(path, key)) as items:
        return next(items, default)


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[Event]) -> None:
    """One compressed JSON object: the header's keys first, so that readers meet them first."""
    with path.open("wb") as raw, _compressor(raw) as file:
        file.write(json.dumps(header)[:-1].encode() + b', "traceEvents": [')
        separator = b"\n"
        for event in events:
            file.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
        file.write(b"\n]}\n")


def _compressor(raw: IO[bytes]) -> gzip.GzipFile:
    # neither name nor time inside: equal traces are equal files
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0, os.SEEK_SET)
        if compressed:
            with gzip.GzipFile(fileobj=raw) as file:
                yield file
        else:
            yield raw
