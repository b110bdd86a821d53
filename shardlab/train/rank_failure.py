"""Failures of a run: as its ranks report them, and as the exception that the caller gets."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import TypeAdapter, ValidationError

from shardlab.core.errors import StorageError, UserError

UNKNOWN_ORDER = 1 << 30
"""of a failure that could not get a number from the store: after all others"""

TIMED_OUT = "Timed out waiting"
"""gloo's message about a rank that neither answers nor closes its connection"""

TIMEOUTS_S = 5.0
"""ranks that wait for the same one time out one after the other, as they began to wait"""


class RunFailed(RuntimeError):
    """A run that a rank or its time limit ended."""

    def __init__(
        self, kind: Literal["timeout", "crash", "memory"], detail: str, summary: str
    ) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        """with the traceback, if there is one"""
        self.summary = summary
        """one line"""

    @property
    def hung(self) -> bool:
        """Return whether ranks waited for one that neither answered nor ended."""
        return TIMED_OUT in self.summary


@dataclass(frozen=True)
class Failure:
    """One report of why an attempt failed; plain values, to be sent as JSON."""

    kind: Literal["user", "storage", "timeout", "crash", "memory"]
    summary: str
    """one line"""
    text: str = ""
    """with the traceback; empty when there is none"""
    order: int = 0
    """n > 0: a rank that reports why it ends was the n-th to do so. 0: the rank was ended, stopped
    or disconnected from outside, which is the cause, whatever the others report"""
    attempt: str = ""
    """name of the attempt; empty before the rendezvous"""
    waited: bool = False
    """timed out waiting for other ranks: one that reports nothing is the cause"""
    disconnected: bool = False
    """another rank closed its connections: if one reports nothing, it is the cause"""

    @classmethod
    def of_report(cls, report: bytes) -> Self | None:
        """Parse JSON from the store; None when no rank can have written it."""
        try:
            return TypeAdapter(cls).validate_json(report)
        except ValidationError:
            return None

    @classmethod
    def of(cls, error: UserError | RunFailed) -> Self:
        """Return the failure that `error` raises again, in another process."""
        if isinstance(error, RunFailed):
            return cls(error.kind, error.summary, error.detail)
        return cls("storage" if isinstance(error, StorageError) else "user", str(error))

    def error(self) -> UserError | RunFailed:
        """Return the exception for the caller of `launch`."""
        if self.kind == "user":
            return UserError(self.summary)
        if self.kind == "storage":
            return StorageError(self.summary)
        return RunFailed(self.kind, self.text or self.summary, self.summary)

    def without_report_of(self, ranks: str) -> Self:
        """Return this failure with the names of the ranks that must have caused it."""
        return replace(self, summary=f"no report from {ranks}: {self.summary}", text="")

    @property
    def transient(self) -> bool:
        """Return whether another attempt could succeed."""
        return self.kind in ("crash", "memory")


def first(failures: Iterable[Failure | None]) -> Failure | None:
    """Return the earliest failure, None when there is none."""
    known = [failure for failure in failures if failure is not None]
    return min(known, key=lambda failure: failure.order, default=None)
