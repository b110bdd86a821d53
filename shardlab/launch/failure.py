"""Why a run failed, as a rank or a command tells it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardlab.core.errors import UserError

UNKNOWN_ORDER = 1 << 30
"""of a failure that nobody could put in line: after all others"""


class RunFailed(RuntimeError):
    """A run that did not end well."""

    def __init__(self, kind: Literal["timeout", "crash", "memory"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Failure:
    """One account of why an attempt failed; plain values, so that it travels as JSON."""

    kind: Literal["user", "timeout", "crash", "memory"]
    summary: str
    """in one line"""
    text: str = ""
    """with the traceback; empty when there is none"""
    order: int = 0
    """a rank that says why it ends was the n-th to do so, n > 0. 0: a rank or command that was
    ended, stopped or cut off from outside; whatever the others complain of, this is the cause"""
    meeting: str = ""
    """of the ranks, as far as they met"""
    waited: bool = False
    """in vain for other ranks: one that says nothing is the cause"""

    def error(self) -> UserError | RunFailed:
        """The exception that tells it to the caller of `launch`."""
        if self.kind == "user":
            return UserError(self.summary)
        return RunFailed(self.kind, self.text or self.summary)

    @property
    def may_pass(self) -> bool:
        """Whether another attempt could go better."""
        return self.kind in ("crash", "memory")


def first(failures: Iterable[Failure | None]) -> Failure | None:
    """The one that came before the others, if there is any."""
    told = [failure for failure in failures if failure is not None]
    return min(told, key=lambda failure: failure.order, default=None)


def lost(command: str) -> Failure:
    """Of a command that no longer answers."""
    return Failure("crash", f"{command} is gone: its command ended or cannot be reached")
