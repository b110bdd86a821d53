"""Folder with the checkpoints of one run, each complete or absent."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardlab.core.files import flush, rename

_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    """Folder of `root/step-00000040` and so on, named by the number of steps done.

    A checkpoint is written under a hidden name, flushed to disk and renamed; it is renamed back
    before it is removed. So a process that is killed leaves no incomplete checkpoint under a
    visible name, and the names alone tell which is the last. One process at a time makes changes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, step: int) -> Path:
        """Return the path of the complete checkpoint of a step."""
        return self._root / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Return the path of a checkpoint that is being written."""
        return _hidden(self.path(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in ascending order."""
        paths = self._root.iterdir() if self._root.is_dir() else ()
        return sorted(int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name)))

    def begin(self, step: int) -> None:
        """Create `unfinished(step)`, empty."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

    def commit(self, step: int) -> None:
        """Make `unfinished(step)` the checkpoint."""
        flush(self.unfinished(step))
        rename(self.unfinished(step), self.path(step))

    def prune(self, keep: int) -> None:
        """Remove all but the last `keep` checkpoints."""
        for step in self.steps()[:-keep]:
            self._remove(step)

    def clear(self) -> None:
        """Remove incomplete checkpoints."""
        for path in self._root.glob(".step-*.partial"):
            shutil.rmtree(path)

    def remove(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it."""
        for step in self.steps():
            self._remove(step)
        self.clear()
        with suppress(OSError):
            self._root.rmdir()

    def _remove(self, step: int) -> None:
        hidden = self.unfinished(step)
        rename(self.path(step), hidden)
        shutil.rmtree(hidden)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
