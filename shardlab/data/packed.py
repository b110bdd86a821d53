"""Files to read as bytes, packed or not."""

import bz2
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardlab.core.errors import UserError

PACKED = (".gz", ".bz2", ".zst")
_BUFFER = 1 << 18


@contextmanager
def open_packed(path: Path) -> Iterator["io.BufferedReader[Any]"]:
    """Open a file, unpacked as it is read if its name ends in .gz, .bz2 or .zst.

    It can be peeked into, but not be sought.

    Raises:
        UserError: in the block too: packed contents are damaged or end early.
    """
    with path.open("rb") as raw:
        if path.suffix not in PACKED:
            yield raw
            return
        try:
            with io.BufferedReader(_unpacked(path, raw), _BUFFER) as file:
                yield file
        except (OSError, EOFError, ValueError, zlib.error) as error:
            if isinstance(error, UserError):
                raise
            reason = " ".join(str(error).split())[:100]
            raise UserError(
                f"{path}: cannot be unpacked as {path.suffix} ({reason}); fetch it again"
            ) from None


def _unpacked(path: Path, raw: BinaryIO) -> io.RawIOBase:
    file: Any
    if path.suffix == ".gz":
        file = gzip.GzipFile(fileobj=raw)
    elif path.suffix == ".bz2":
        file = bz2.BZ2File(raw)
    else:
        try:
            import pyarrow
        except ImportError:
            raise UserError(
                f"{path}: .zst needs the pyarrow package: pip install 'shardlab[datasets]'"
            ) from None
        file = pyarrow.CompressedInputStream(raw, "zstd")
    return cast(io.RawIOBase, file)


def skip_mark(path: Path, file: io.BufferedReader) -> int:
    """Pass over a byte order mark at the beginning, and return its length.

    Raises:
        UserError: it is that of UTF-16.
    """
    mark = file.peek(3)[:3]
    if mark.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}: byte 0: this is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    return len(file.read(3)) if mark == b"\xef\xbb\xbf" else 0
