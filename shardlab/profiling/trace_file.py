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
"""bytes in which one of these keys shows that a file is a trace"""
_DAMAGED = EOFError, OSError, ValueError, zlib.error
"""ValueError: of JSON and of UTF-8"""
_INVALID = ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError
"""of values that are absent, or of other types than a profiler writes"""


class TraceFile(NamedTuple):
    """Contents of a trace."""

    header: dict[str, Any]
    """top-level values except the events"""
    events: list[TraceEvent]
    """in the order of the file"""


def load_trace(path: str | Path) -> TraceFile:
    """Return the contents of a trace, which must fit in memory.

    Raises:
        UserError: the file is missing, truncated or no JSON.
    """
    with refusing(path):
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data[:2] == _GZIP else data
        # torch writes names as they are, with line breaks and bytes that are no UTF-8
        header = json.loads(text.decode("utf-8-sig", errors="replace"), strict=False)
        # Chrome also opens a list of events
        if isinstance(header, list):
            return TraceFile({}, header)
        if "traceEvents" not in header:
            raise UserError(
                f"{path}: no traceEvents: not a trace of torch.profiler, as what "
                "ExecutionTraceObserver writes, which holds no times"
            )
        return TraceFile(header, header.pop("traceEvents"))


def is_trace(path: Path) -> bool:
    """Return whether a file is named and begins like a trace, or is damaged."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as file:
            return _EVENTS.search(file.read(_HEAD)) is not None
    except _DAMAGED:
        return True  # reading all of it says what is wrong


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[TraceEvent]) -> None:
    """Write one compressed JSON object: the header first, then one line per event; null for what is
    no finite number, which JSON has no word for."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

    def encode(value: Mapping[str, Any]) -> str:
        try:
            return encoder.encode(value)
        except ValueError:
            return encoder.encode(_finite(value))

    # without name and time in the header of gzip, so that equal traces are equal files
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
    """Turn errors of reading a trace, or of what it says, into one line that names the fix."""
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
            f"{path}: not a whole trace ({reason}): copy it whole, or trace the run again"
        ) from None
