"""What goes wrong in the threads of a rank reaches the training thread, and the other ranks."""

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
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._first: Exception | None = None

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
        self._raise()
        try:
            yield
        except BaseException as error:
            self._raise()
            if harmless():
                raise
            self._raise_account(error)
            self._keep(error)
            raise

    def _raise_account(self, error: BaseException) -> None:
        """The end of another rank shows here as a broken connection: it is the cause."""
        if isinstance(error, Exception) and not isinstance(error, UserError):
            try:
                self._control.check()
            except RuntimeError as account:
                self._first = account
                raise account from error

    def _keep(self, error: BaseException) -> None:
        if self._first is None:
            if not isinstance(error, Exception):
                error = RuntimeError(
                    f"slide: a step was broken off ({type(error).__name__}) and parameters may be "
                    "between two steps: begin anew from what was saved"
                )
            self._first = error
            self._control.fail(str(error) or type(error).__name__)

    def _raise(self) -> None:
        if self._first is not None:
            raise self._first
