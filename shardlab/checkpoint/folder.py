"""The checkpoints of one run on disk: each is whole or absent."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardlab.core.files import flush, rename

_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    """`root/step-00000040` and so on, named by the steps that were done.

    A checkpoint is written under a hidden name, flushed to disk and renamed; it is hidden again
    before it is removed. Whoever is killed leaves nothing that looks whole, and which one is the
    last follows from the names alone. One process at a time makes changes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, once it is whole."""
        return self._root / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Where it is before."""
        return _hidden(self.path(step))

    def steps(self) -> list[int]:
        """Of all checkpoints, in ascending order."""
        paths = self._root.iterdir() if self._root.is_dir() else ()
        return sorted(int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name)))

    def begin(self, step: int) -> None:
        """Makes `unfinished(step)`, empty."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

    def commit(self, step: int) -> None:
        """What is in `unfinished(step)` is the checkpoint."""
        flush(self.unfinished(step))
        rename(self.unfinished(step), self.path(step))

    def prune(self, keep: int) -> None:
        """Removes all but the last ones."""
        for step in self.steps()[:-keep]:
            self._remove(step)

    def clear(self) -> None:
        """Removes what was left unfinished."""
        for path in self._root.glob(".step-*.partial"):
            shutil.rmtree(path)

    def remove(self) -> None:
        """Removes all that is whole or unfinished, and the folder if nothing else is in it."""
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
