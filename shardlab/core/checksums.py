"""Checksums of what was written, compared by whoever reads it.

JSON files end with the checksum of all bytes before it, those of JSON lines once, in the last line.
Such a file may also hold the checksums of files that have no place for their own.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, write_text

_KEY = "checksum"
_END = re.compile(rb'"checksum": "([0-9a-f]{64})"\n?\}\n\Z')
_LONGEST_END = 100


def write_checked(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with sorted keys, and its checksum, atomically."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    write_text(path, _with_checksum(text.removesuffix("}").rstrip(), "\n ", "\n"))


def read_checked(path: str | Path, fix: str) -> dict[str, Any]:
    """Read the object that `write_checked` wrote.

    Args:
        fix: what the user should do when the file is not as it was written.

    Raises:
        UserError: it is missing or differs.
    """
    value: dict[str, Any] = _parse(path, _checked(path, fix), fix)
    value.pop(_KEY)
    return value


def write_checked_lines(path: str | Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, keys sorted; the last has the checksum of the file."""
    lines = "\n".join(json.dumps(value, sort_keys=True) for value in values)
    write_text(path, _with_checksum(lines.removesuffix("}"), " ", "") if values else "")


def read_checked_lines(path: str | Path, fix: str) -> list[dict[str, Any]]:
    """Read the objects that `write_checked_lines` wrote.

    Raises:
        UserError: the file is missing or differs, or holds none.
    """
    values = [_parse(path, line, fix) for line in _checked(path, fix).splitlines()]
    values[-1].pop(_KEY)
    return values


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


def refuse_damage(folder: Path, expected: Mapping[str, str], fix: str) -> None:
    """Compare files of a folder with their checksums.

    Raises:
        UserError: one is missing or differs.
    """
    for name, what in damage(folder, expected):
        raise UserError(f"{folder / name}: {what}: {fix}")


def refuse_damage_of(names: Sequence[str], listed: Path, fix: str) -> None:
    """Compare files with their checksums under `files` of a checked JSON file beside them.

    Raises:
        UserError: one of them or that file is missing, differs or has no checksum.
    """
    known = read_checked(listed, fix).get("files", {})
    for name in (name for name in names if name not in known):
        raise UserError(f"{listed}: has no checksum of {name}: {fix}")
    refuse_damage(listed.parent, {name: known[name] for name in names}, fix)


def _with_checksum(head: str, before: str, after: str) -> str:
    """Return the text of an object, which `head` is without its end, with its checksum."""
    head += f"{'' if head.endswith('{') else ','}{before}"
    digest = hashlib.sha256(head.encode()).hexdigest()
    return f'{head}"{_KEY}": "{digest}"{after}}}\n'


def _checked(path: str | Path, fix: str) -> bytes:
    """Return the bytes of a file that ends with its checksum."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {fix}") from None
    found = _END.search(content, max(0, len(content) - _LONGEST_END))
    if found is None:
        why = "damaged, or of an earlier version: it does not end with its checksum"
        raise UserError(f"{path}: {why}: {fix}")
    if hashlib.sha256(memoryview(content)[: found.start()]).hexdigest() != found[1].decode():
        raise UserError(f"{path}: damaged: its checksum differs: {fix}")
    return content


def _parse(path: str | Path, text: bytes, fix: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # written so by another program
        raise UserError(f"{path}: not JSON ({error}): {fix}") from None
