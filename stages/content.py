"""Record what a file or folder outside of the experiment holds, for the stages that read it."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import files_below, sha256_of_file, sha256_of_value, state_of
from shardlab.core.progress import say
from stages import plans
from stages.common import run
from stages.outside import CONTENTS


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
        seen = state_of(root)
        if known is not None and (known.path, known.seen) == (path, seen):
            return known
        files = files_below(root)
        if not files:
            what = "an empty folder" if root.is_dir() else "no such file"
            raise UserError(f"{root}: {what}")
        digests = {name: sha256_of_file(file) for name, file in files.items()}
        sizes = [file.stat().st_size for file in files.values()]
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from None
    return Content(
        path=path,
        sha256=digests[""] if root.is_file() else sha256_of_value(digests),
        files=len(files),
        bytes=sum(sizes),
        seen=seen,
    )


def content_of(params: Parameters, name: str) -> Content:
    """Return the content of an input.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    record = CONTENTS / f"{name}.json"
    known = Content.from_file(record, f"remove {record}") if record.exists() else None
    try:
        return content(plans.content(params, name)["path"], known)
    except UserError as error:
        raise UserError(f"inputs.{name}: {error}") from None


def main(params: Parameters, name: str) -> None:
    """Write data/contents/NAME.json."""
    found = content_of(params, name)
    found.to_file(CONTENTS / f"{name}.json")
    say(f"content {name}: {found.files} files, {found.bytes:,} bytes in {found.path}")


if __name__ == "__main__":
    run(main)
