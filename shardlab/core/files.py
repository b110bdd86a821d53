"""Atomic files: written under a temporary name, flushed to disk, renamed."""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_HERE, _RENAME_EXCHANGE = -100, 2
"""AT_FDCWD of fcntl.h and a flag of renameat2(2)"""


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` that is renamed to it when the block succeeds.

    The block may write a file or make a folder there; nothing is left behind when it fails.

    A process that is killed at any time leaves the old one or the new one. Only where a file system
    cannot exchange folders (NFS), both are in a hidden folder next to it for a moment.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        temporary = holder / path.name
        yield temporary
        flush(temporary)
        if path.is_dir():
            _exchange(temporary, path, holder / "before")
        else:
            temporary.replace(path)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


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
    """Write JSON with sorted keys and a final newline, so that equal values make equal files."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a whole JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json_lines(path: str | Path, values: list[Any]) -> None:
    """Write one JSON value per line, keys sorted."""
    write_text(path, "".join(json.dumps(v, sort_keys=True) + "\n" for v in values))


def read_json_lines(path: str | Path) -> list[Any]:
    """Read the values that `write_json_lines` wrote."""
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def sha256_of_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def checksums(folder: Path, share: slice = slice(None)) -> dict[str, str]:
    """Return the SHA-256 of the files in a folder, by their relative paths.

    Args:
        share: which of them in the order of their paths, so that ranks can do it together.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[share]
    return {str(path.relative_to(folder)): sha256_of_file(path) for path in paths}


def damage(
    folder: Path, expected: Mapping[str, str], share: slice = slice(None)
) -> Iterator[tuple[str, str]]:
    """Return the files that differ from `checksums`, each as missing or damaged."""
    for name in sorted(expected)[share]:
        if not (folder / name).is_file():
            yield name, "missing"
        elif sha256_of_file(folder / name) != expected[name]:
            yield name, "damaged"


def sha256_of_value(value: Any) -> str:
    """Hash a JSON value; the order of keys does not matter."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
