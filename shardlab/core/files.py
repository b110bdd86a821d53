"""Files: atomic writes under a temporary name, JSON, and SHA-256."""

import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from shardlab.core.errors import StorageError, UserError

_REPEAT = "remove it, and run what writes it again"
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
    """Turn errors of the disk into one line for the user.

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
        # the block may have failed to read another file
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

    The block may write a file or create a folder. If the block fails or the process is killed, the
    old file stays. A folder is replaced by two renames; a process that is killed between them
    leaves no folder.

    Raises:
        StorageError: `path` cannot be written.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(path) as holder:
            temporary = holder / path.name
            yield temporary
            _open_to_others(temporary, holder / f"{path.name}.new")
            if path.is_dir():
                temporary.stat()  # raises if the block created nothing
                path.rename(holder / "before")
            temporary.replace(path)


def _open_to_others(made: Path, new: Path) -> None:
    """Give files the permissions of the umask; libraries (safetensors) give them to the owner only.

    Args:
        new: Path for a new file, whose mode shows the umask.
    """
    new.touch()
    mode = new.stat().st_mode
    for path in files_below(made).values():
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | mode)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `path`, for a file that will be renamed to `path`.

    The folder is removed at the end. If the process is killed, the next process that calls this
    for `path` removes it.
    """
    # the names are .NAME.PID.RANDOM
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        pid = stale.name.split(".")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}.", dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary(name: str) -> AbstractContextManager[Path]:
    """Return an `unfinished` folder in TMPDIR."""
    return unfinished(Path(tempfile.gettempdir(), name))


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any, allow_nan: bool = False) -> None:
    """Write JSON atomically, with sorted keys, so that equal values give equal files.

    Args:
        allow_nan: Write numbers that are not finite as NaN and Infinity, as Python does.

    Raises:
        ValueError: A number is not finite, and `allow_nan` is not set; see `finite`.
    """
    options: dict[str, Any] = {"indent": 1, "sort_keys": True, "ensure_ascii": False}
    write_text(path, json.dumps(value, **options, allow_nan=allow_nan) + "\n")


def read_json(path: str | Path, fix: str = _REPEAT) -> Any:
    """Read a JSON file.

    Args:
        fix: What the user should do if the file is missing or damaged.

    Raises:
        UserError: The file is missing or damaged.
    """
    return _parse(path, _read(path, fix), fix)


def write_json_lines(path: str | Path, values: Sequence[Any]) -> None:
    """Write one JSON value per line atomically, with sorted keys; numbers must be finite."""
    lines = (json.dumps(value, sort_keys=True, allow_nan=False) for value in values)
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_json_lines(path: str | Path, fix: str = _REPEAT) -> list[Any]:
    """Read the values that `write_json_lines` wrote.

    Raises:
        UserError: The file is missing or damaged.
    """
    lines = _read(path, fix).splitlines()
    return [_parse(f"{path}:{i}", line, fix) for i, line in enumerate(lines, 1)]


def _read(path: str | Path, fix: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {fix}") from None


def _parse(where: str | Path, text: bytes, fix: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: damaged: not JSON ({error}): {fix}") from None


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_of_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_files(folder: Path, share: slice = slice(None)) -> dict[str, str]:
    """Return the SHA-256 of the files in a folder, by their relative paths.

    Args:
        share: Part of the files, sorted by path, so that each rank can hash a part.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[share]
    return {str(path.relative_to(folder)): sha256_of_file(path) for path in paths}


def find_damage(
    folder: Path, expected: Mapping[str, str], share: slice = slice(None)
) -> tuple[str, str] | None:
    """Return the first file that differs from `expected`, and `missing` or `damaged`; else None.

    Args:
        expected: Result of `sha256_of_files`.
        share: Part of the files, sorted by path.
    """
    for name in sorted(expected)[share]:
        if not (folder / name).is_file():
            return name, "missing"
        if sha256_of_file(folder / name) != expected[name]:
            return name, "damaged"
    return None


def refuse_damage(folder: Path, expected: Mapping[str, str], fix: str) -> None:
    """Compare files of a folder with their SHA-256.

    Raises:
        UserError: A file is missing or differs.
    """
    if damage := find_damage(folder, expected):
        name, kind = damage
        raise UserError(f"{folder / name}: {kind}: {fix}")


def files_below(root: Path) -> dict[str, Path]:
    """Return the files of a folder by their relative paths; for a file, the file by an empty path.

    Links to folders are not followed.
    """
    if root.is_file():
        return {"": root}
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def state_of(root: Path) -> str:
    """Return a digest of relative paths, sizes and times of a file or of the files of a folder.

    While it is the same, no file was written.
    """
    files = {name: file.stat() for name, file in files_below(root).items()}
    return sha256_of_value({name: (s.st_size, s.st_mtime_ns) for name, s in files.items()})


def sha256_of_value(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
