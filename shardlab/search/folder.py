"""Folder of a search: its parameters, the tree's data, the time that it took, and its stages.

A stage runs there in a child process, which ends with this one. It is not repeated when its output
is there: all outputs are of the one params.yaml of the folder.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardlab.config.parameters import Parameters, read_tree
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file, write_text
from shardlab.core.process import die_with_parent
from shardlab.core.progress import say, stopwatch
from shardlab.search.parameters import first_difference

_CONTEXT = multiprocessing.get_context("fork")


class TimeIsUpError(Exception):
    """A stage that was ended, since the search has no more time."""


class Step(NamedTuple):
    """A stage with its arguments."""

    main: Callable[..., None]
    output: str
    """file that is written last"""
    arguments: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    overrides: tuple[str, ...] = ()
    """of parameters"""

    @property
    def name(self) -> str:
        """Name of the stage with its arguments."""
        stage = self.main.__module__.rpartition(".")[2]
        return " ".join([stage, *self.arguments, *(str(each) for each in self.options.values())])

    def work(self) -> None:
        """Do it, with the parameters of the working directory."""
        self.main(Parameters(overrides=self.overrides), *self.arguments, **self.options)


class Spent(Document):
    """Record of a search that is under way."""

    tokens: str
    """checksum of the manifest of the tokens that it trains on"""
    seconds: dict[str, float] = {}
    """by stage, interrupted calls included"""

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())


class SearchFolder:
    """Folder of a search.

    Args:
        path: may be absent.
        tree: parameters of the search.
        limit_s: seconds of all stages, those of earlier calls included.

    Raises:
        UserError: it holds a search with other parameters.
    """

    def __init__(self, path: Path, tree: dict[str, Any], limit_s: float) -> None:
        self.path, self._tree, self._limit_s = path, tree, limit_s
        self._params = path / "params.yaml"
        if self._params.exists():
            difference = first_difference(read_tree(self._params), tree)
            if difference is not None:
                raise UserError(f"{path}: of other parameters ({difference}): {self._fix}")

    def begin(self, data: Path) -> None:
        """Begin the search, or go on with it.

        Args:
            data: folder of the tree with the tokens.

        Raises:
            UserError: it was on other tokens.
        """
        tokens = sha256_of_file(data / "tokens/manifest.json")
        if self._params.exists():
            self._spent = Spent.from_file(self.path / "spent.json", f"remove {self.path}")
            if self._spent.tokens != tokens:
                raise UserError(f"{self.path}: of other tokens than {data}: {self._fix}")
            return
        self._save(Spent(tokens=tokens))
        (self.path / "data").unlink(missing_ok=True)
        (self.path / "data").symlink_to(os.path.relpath(data, self.path))
        # last: a folder without it is no search yet
        write_text(self._params, yaml.safe_dump(self._tree, sort_keys=False))

    @property
    def _fix(self) -> str:
        return f"choose another --name, or remove {self.path}"

    def _save(self, spent: Spent) -> None:
        self._spent = spent
        spent.to_file(self.path / "spent.json")

    def parameters(self) -> Parameters:
        """Return the parameters of the search."""
        return Parameters(self._params)

    def seconds(self, *stages: str) -> float:
        """Return the seconds of stages by the beginnings of their names; without any, of all."""
        known = self._spent.seconds.items()
        return sum(seconds for name, seconds in known if not stages or name.startswith(stages))

    @property
    def left_s(self) -> float:
        """Seconds that are left for stages."""
        return self._limit_s - self._spent.total_s

    def has(self, step: Step) -> bool:
        """Return whether a stage is done."""
        return (self.path / step.output).exists()

    def run(self, step: Step) -> None:
        """Run a stage, unless its output is there.

        Raises:
            TimeIsUpError: no time was left, or not enough.
            UserError: the stage refused something.
        """
        if self.has(step):
            return
        if self.left_s <= 0:
            raise TimeIsUpError
        elapsed = stopwatch()
        try:
            run_stage(step.name, step.work, self.path, self.left_s)
        finally:
            known = self._spent.seconds
            seconds = known | {step.name: known.get(step.name, 0.0) + elapsed()}
            self._save(self._spent.model_copy(update={"seconds": seconds}))


def run_stage(
    name: str, work: Callable[[], None], folder: Path, limit_s: float | None = None
) -> None:
    """Do the work of a stage in a child process, whose working directory is `folder`.

    The child has the imports of this process. It and its ranks end with it.

    Raises:
        TimeIsUpError: it took longer than `limit_s`.
        UserError: the stage refused something.
        SystemExit: it failed otherwise, and has shown a traceback.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(work, folder, os.getpid(), theirs))
    process.start()
    theirs.close()
    try:
        process.join(limit_s)
        if process.is_alive():
            raise TimeIsUpError
    finally:
        # after a signal, too: nothing of the stage is left when this command ends
        if process.is_alive():
            process.terminate()
        process.join()
    if process.exitcode == 2 and ours.poll():
        raise UserError(f"{name}: {ours.recv_bytes().decode()}")
    if process.exitcode:
        say(f"search: {name}: failed, as shown above: the same command goes on from here")
        raise SystemExit(1)


def _work(work: Callable[[], None], folder: Path, parent: int, pipe: Connection) -> None:
    die_with_parent(parent, signal.SIGTERM)
    os.chdir(folder)
    try:
        work()
    except UserError as error:
        pipe.send_bytes(str(error).encode())
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
