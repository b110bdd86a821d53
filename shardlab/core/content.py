"""Content of files and folders that are read where they lie, and may change there."""

from pathlib import Path

from shardlab.core.document import Document
from shardlab.core.files import files_below, sha256_of_file, sha256_of_value, state_of


class Content(Document):
    """Content of a file or a folder."""

    path: str
    sha256: str
    """of a file; of a folder, that of the relative paths and SHA-256 of its files"""
    state: str
    """digest of relative paths, sizes and times: while it is the same, nothing is read again"""

    @classmethod
    def of(cls, path: str | Path, known: "Content | None" = None) -> "Content | None":
        """Return the content of a path, None without a file; links to folders are not followed.

        Args:
            known: the content as it was: returned where the state is still the same.

        Raises:
            OSError: a file cannot be read.
        """
        state = state_of(Path(path))
        if known is not None and (known.path, known.state) == (str(path), state):
            return known
        digests = {file: sha256_of_file(where) for file, where in files_below(Path(path)).items()}
        if not digests:
            return None
        sha256 = digests[""] if Path(path).is_file() else sha256_of_value(digests)
        return cls(path=str(path), sha256=sha256, state=state)
