"""What goes wrong in the threads of a rank reaches the training thread, and the other ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

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
    def surfacing(self) -> Iterator[None]:
        """Around what the training thread does: it ends with the first error of any thread."""
        self._raise()
        try:
            yield
        except Exception as error:
            self._raise()
            self._keep(error)
            raise

    def _keep(self, error: Exception) -> None:
        if self._first is None:
            self._first = error
            self._control.fail(str(error) or type(error).__name__)

    def _raise(self) -> None:
        if self._first is not None:
            raise self._first
