"""Atomic files: written under a temporary name, flushed to disk, renamed."""

import ctypes
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardlab.core.errors import StorageError, UserError
from shardlab.core.unfinished import unfinished

_CHUNK = 1 << 20
_HERE, _RENAME_EXCHANGE = -100, 2
"""AT_FDCWD of fcntl.h and a flag of renameat2(2)"""
_FULL, _REFUSED, _BLOCKED = "free space", "make it writable", "remove what is in its way"
_FIXES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EROFS: _REFUSED,
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EEXIST: _BLOCKED,
    errno.ENOTDIR: _BLOCKED,
    errno.EISDIR: _BLOCKED,
    errno.EIO: "check the disk",
}


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn what a disk refuses into one line for the user.

    Raises:
        StorageError: `path` cannot be written.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # libraries in Rust (safetensors, tokenizers) raise errors of their own
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else number and int(number[1])
        if code is None or code not in _FIXES:
            raise
        reason = os.strerror(code)
        # reading may have failed while it was being written
        if isinstance(error, OSError) and error.filename is not None:
            name = os.fsdecode(error.filename)
            if Path(path).parent not in Path(name).parents:
                reason += f": {name}"
        raise StorageError(
            f"{path}: cannot be written ({reason}): {_FIXES[code]}, and run it again"
        ) from error


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` that is renamed to it when the block succeeds.

    The block may write a file or make a folder there; nothing is left behind when it fails.

    A process that is killed, or a machine that loses power, at any time leaves the old one or the
    new one. What a killed process was writing is removed by the next one. Only where a file system
    cannot exchange folders (NFS), both are in a hidden folder next to it for a moment.

    Raises:
        StorageError: it cannot be written.
    """
    with writing(path), _replacing(Path(path)) as temporary:
        yield temporary


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    make_folder(path.parent)
    with unfinished(path) as holder:
        temporary = holder / path.name
        yield temporary
        flush(temporary)
        if path.is_dir():
            _exchange(temporary, path, holder / "before")
        else:
            temporary.replace(path)
        _sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and flush their names to disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Rename a folder over an existing one, which is then `new` or `aside`."""
    if not _exchanged(new, old):
        old.rename(aside)
        try:
            new.rename(old)
        except OSError:
            aside.rename(old)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically; return whether that was possible (Linux only)."""
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    call = ctypes.CDLL(None, use_errno=True).renameat2
    if call(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS):  # not supported by the file system or the kernel
        return False
    raise OSError(error, os.strerror(error), str(other))


def flush(path: Path) -> None:
    """Flush a file, or a folder with all that is in it, to disk."""
    for inside in path.rglob("*"):
        _sync(inside)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder within its folder, and flush that to disk."""
    path.rename(target)
    _sync(target.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON with sorted keys and a final newline, so that equal values make equal files.

    Raises:
        ValueError: a number is not finite, for which JSON has no word; see `finite`.
    """
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: str | Path) -> Any:
    """Read a whole JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json_lines(path: str | Path, values: list[Any]) -> None:
    """Write one JSON value per line, keys sorted; as strict as `write_json`."""
    lines = (json.dumps(value, sort_keys=True, allow_nan=False) for value in values)
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_json_lines(path: str | Path) -> list[Any]:
    """Read the values that `write_json_lines` wrote."""
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_of_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(root: Path) -> dict[str, Path]:
    """Return the files of a folder by their relative paths; that of a file itself is empty.

    Links to folders are not followed.
    """
    if root.is_file():
        return {"": root}
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def state_of(root: Path) -> str:
    """Return a digest of relative paths, sizes and times of a file, or of those of a folder: while
    it is the same, nothing was written."""
    files = {name: file.stat() for name, file in files_below(root).items()}
    return sha256_of_value({name: (s.st_size, s.st_mtime_ns) for name, s in files.items()})


def sha256_of_value(value: Any) -> str:
    """Hash a JSON value; the order of keys does not matter."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
