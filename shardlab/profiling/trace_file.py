"""Chrome traces on disk, compressed or not."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.core.errors import UserError

TraceEvent = dict[str, Any]
_GZIP = b"\x1f\x8b"
_HEAD, _EVENTS = 1 << 20, re.compile(rb'"(traceEvents|deviceProperties|ph)"\s*:')
"""A file is a trace if one of these keys is within this number of bytes from its start."""
_DAMAGED = EOFError, OSError, ValueError, zlib.error
"""Errors of damaged files; ValueError by JSON and UTF-8."""
_INVALID = ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError
"""Errors by values that are absent, or of types that a profiler does not write."""


class TraceFile(NamedTuple):
    """Contents of a trace."""

    header: dict[str, Any]
    """Top-level values except the events."""
    events: list[TraceEvent]
    """Events in the order of the file."""


def load_trace(path: str | Path) -> TraceFile:
    """Return the contents of a trace, which must fit in memory.

    Raises:
        UserError: the file is missing, truncated or not JSON.
    """
    with refusing(path):
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data[:2] == _GZIP else data
        # torch writes names unchanged, with line breaks and bytes that are not UTF-8
        header = json.loads(text.decode("utf-8-sig", errors="replace"), strict=False)
        # Chrome also opens a list of events
        if isinstance(header, list):
            return TraceFile({}, header)
        if "traceEvents" not in header:
            raise UserError(
                f"{path}: not a trace of torch.profiler (no traceEvents), or one of "
                "ExecutionTraceObserver, which holds no times: trace the run with "
                "torch.profiler.profile"
            )
        return TraceFile(header, header.pop("traceEvents"))


def is_trace(path: Path) -> bool:
    """Return whether name and content of a file look like a trace; also True if it is damaged."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as file:
            return _EVENTS.search(file.read(_HEAD)) is not None
    except _DAMAGED:
        return True  # `load_trace` then says what is wrong


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[TraceEvent]) -> None:
    """Write one compressed JSON object: the header, then one line per event.

    Numbers that are not finite, which JSON cannot represent, become null.
    """
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

    def encode(value: Mapping[str, Any]) -> str:
        try:
            return encoder.encode(value)
        except ValueError:
            return encoder.encode(_finite(value))

    # the header of gzip has no name and no time, so that equal traces are equal files
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(f'{encode(header)[:-1]}, "traceEvents": ['.encode())
        separator = "\n"
        for event in events:
            file.write((separator + encode(event)).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turn errors of a damaged or invalid trace into one line with the fix."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such trace: run the train stage first") from None
    except (*_DAMAGED, *_INVALID) as error:
        reason = " ".join(str(error).split())[:100]
        if isinstance(error, _INVALID):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{path}: incomplete trace ({reason}): copy it again, or trace the run again"
        ) from None
