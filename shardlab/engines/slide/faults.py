"""What goes wrong in the threads of a rank reaches the training thread, and the other ranks."""

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from shardlab.core.errors import UserError
from shardlab.engines.slide.control import Control

P = ParamSpec("P")


class Faults:
    """Keeps the first error of a thread, and tells the ranks of the node.

    A thread that fails leaves others waiting, on this rank and elsewhere: their waits end at once,
    and what is raised is the cause.

    It keeps no traceback, and leaves none to the threads: that of the training thread would keep
    the engine, which could not be collected.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._first: Exception | None = None
        self.told = False
        """whether the training thread has heard of an error"""

    def watched(self, call: Callable[P, None]) -> Callable[P, None]:
        """The call of a thread, whose error is kept."""

        @wraps(call)
        def watched(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._keep(error)
                raise

        return watched

    @contextmanager
    def surfacing(self, harmless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Around what the training thread does: it ends with the first error of any thread.

        Args:
            harmless: whether what the block raises has changed nothing; then it is not kept.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            self._check_within(error)
            if harmless():
                raise
            self._find_account(error)
            self._check_within(error)
            self._keep(error)
            self.told = True
            raise

    def check(self) -> None:
        """Raises the first error, if there is one."""
        if self._first is not None:
            self.told = True
            raise _without_frames(self._first)

    def _check_within(self, error: BaseException) -> None:
        """Raises the first error in place of one that it has led to, or of itself."""
        if self._first is not None:
            error.__traceback__ = None  # a thread may keep it
            self.told = True
            raise _without_frames(self._first) from None

    def _find_account(self, error: BaseException) -> None:
        """The end of another rank shows here as a broken connection: it is the cause."""
        if isinstance(error, Exception) and not isinstance(error, UserError):
            try:
                self._control.check()
            except RuntimeError as account:
                account.add_note(f"it shows here as {type(error).__name__}: {error}")
                self._first = _without_frames(account)

    def _keep(self, error: BaseException) -> None:
        if self._first is None:
            if not isinstance(error, Exception):
                error = RuntimeError(
                    f"slide: a step was broken off ({type(error).__name__}) and parameters may be "
                    "between two steps: begin anew from what was saved"
                )
            self._first = _without_frames(error)
            if error.__traceback__ is not None:
                self._first.add_note("".join(traceback.format_tb(error.__traceback__)))
            self._control.fail(str(error) or type(error).__name__)


def _without_frames(error: Exception) -> Exception:
    """An equal one, which keeps nothing alive."""
    try:
        return copy.copy(error)
    except Exception:  # its type takes other arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
