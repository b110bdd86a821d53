"""Propagation of errors between the threads of a rank and the ranks of a node."""

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from shardlab.core.errors import UserError
from shardlab.engines.slide.rank_progress import RankProgress

P = ParamSpec("P")


class ErrorRelay:
    """First error of this rank's threads, for its training thread and the node's other ranks.

    A thread that fails leaves others waiting, on this rank and elsewhere: their waits end at once
    and raise the cause.

    It keeps no traceback and leaves none to the threads: the frames of the training thread would
    keep the engine from being collected.
    """

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress
        self._first: Exception | None = None
        self.raised = False
        """whether the training thread has raised an error"""

    def guard(self, call: Callable[P, None]) -> Callable[P, None]:
        """Wrap the call of a thread, so that its error is kept."""

        @wraps(call)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._keep(error)
                raise

        return guarded

    @contextmanager
    def raising(self, harmless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Let a block of the training thread end with the first error of any thread.

        Args:
            harmless: whether what the block raises has changed nothing; then it is not kept.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            self._raise_instead_of(error)
            if harmless():
                raise
            self._find_cause(error)
            self._raise_instead_of(error)
            self._keep(error)
            self.raised = True
            raise

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._first is not None:
            self.raised = True
            raise _without_frames(self._first)

    def _raise_instead_of(self, error: BaseException) -> None:
        """Raise the first error in place of one that it has led to, or of itself."""
        if self._first is not None:
            error.__traceback__ = None  # the future of a thread may keep it, and so the engine
            self.raised = True
            raise _without_frames(self._first) from None

    def _find_cause(self, error: BaseException) -> None:
        """Take the error that another rank reported: its end shows here as a lost connection."""
        if isinstance(error, Exception) and not isinstance(error, UserError):
            try:
                self._progress.check()
            except RuntimeError as cause:
                cause.add_note(f"it shows here as {type(error).__name__}: {error}")
                self._first = _without_frames(cause)

    def _keep(self, error: BaseException) -> None:
        if self._first is None:
            if not isinstance(error, Exception):
                error = RuntimeError(
                    f"slide: a step was broken off ({type(error).__name__}) and parameters may be "
                    "between two steps: continue from a checkpoint"
                )
            self._first = _without_frames(error)
            if error.__traceback__ is not None:
                self._first.add_note("".join(traceback.format_tb(error.__traceback__)))
            self._progress.fail(str(error) or type(error).__name__)


def _without_frames(error: Exception) -> Exception:
    """Return an equal error that keeps no frames alive."""
    try:
        return copy.copy(error)
    except Exception:  # its type takes other arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
