"""Record what a file or folder outside of the experiment holds, for the stages that read it."""

from pathlib import Path

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, sha256_of_value
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from stages import plans
from stages.common import run


class Content(Document):
    """Content of a file or a folder."""

    path: str
    sha256: str
    """of a file; of a folder, that of the relative paths and SHA-256 of its files"""
    files: int
    bytes: int
    seen: str
    """digest of relative paths, sizes and times: while it is the same, nothing is read again"""


def content(path: str, known: Content | None = None) -> Content:
    """Return the content of a file or folder; links to folders are not followed.

    Args:
        known: what was there before.

    Raises:
        UserError: there is nothing, or it cannot be read.
    """
    root = Path(path)
    try:
        files = {name: file.stat() for name, file in _files(root).items()}
        times = {name: (each.st_size, each.st_mtime_ns) for name, each in files.items()}
        seen = sha256_of_value(times)
        if known is not None and (known.path, known.seen) == (path, seen):
            return known
        digests = {name: sha256_of_file(root / name) for name in files}
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from None
    return Content(
        path=path,
        sha256=digests[""] if root.is_file() else sha256_of_value(digests),
        files=len(files),
        bytes=sum(each.st_size for each in files.values()),
        seen=seen,
    )


def _files(root: Path) -> dict[str, Path]:
    """Return the files by their relative paths; that of a file itself is empty."""
    if root.is_file():
        return {"": root}
    files = [file for file in root.rglob("*") if file.is_file()]
    if not files:
        raise UserError(f"{root}: {'an empty folder' if root.is_dir() else 'no such file'}")
    return {file.relative_to(root).as_posix(): file for file in files}


def content_of(params: Parameters, name: str) -> Content:
    """Return the content of an input.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    record = plans.INPUTS / f"{name}.json"
    known = Content.from_file(record, f"remove {record}") if record.exists() else None
    try:
        return content(plans.content(params, name)["path"], known)
    except UserError as error:
        raise UserError(f"inputs.{name}: {error}") from None


def main(params: Parameters, name: str) -> None:
    """Write data/inputs/NAME.json."""
    found = content_of(params, name)
    found.to_file(plans.INPUTS / f"{name}.json")
    say(f"content {name}: {found.files} files, {found.bytes:,} bytes in {found.path}")


if __name__ == "__main__":
    run(main)
