"""Content of files and folders that are read in place, and may change."""

from pathlib import Path

from shardlab.core.document import Document
from shardlab.core.files import files_below, sha256_of_file, sha256_of_value, state_of


class Content(Document):
    """Content of a file or a folder."""

    path: str
    sha256: str
    """SHA-256 of the file; for a folder, of the relative paths and SHA-256 of its files."""
    state: str
    """Digest of relative paths, sizes and times. While it is the same, files are not read again."""

    @classmethod
    def of(cls, path: str | Path, previous: "Content | None" = None) -> "Content | None":
        """Return the content of a path, or None if there is no file.

        Links to folders are not followed.

        Args:
            previous: Earlier content; it is returned if the state has not changed.

        Raises:
            OSError: A file cannot be read.
        """
        state = state_of(Path(path))
        if previous is not None and (previous.path, previous.state) == (str(path), state):
            return previous
        digests = {file: sha256_of_file(where) for file, where in files_below(Path(path)).items()}
        if not digests:
            return None
        sha256 = digests[""] if Path(path).is_file() else sha256_of_value(digests)
        return cls(path=str(path), sha256=sha256, state=state)
