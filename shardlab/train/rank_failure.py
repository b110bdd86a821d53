"""Failures of a run: what a rank reports, and the exception that the caller of `launch` gets."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from shardlab.core.errors import StorageError, UserError

_TIMED_OUT = "Timed out waiting"
"""gloo's message about a rank that neither answers nor closes its connection"""
_DISCONNECTED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""gloo's messages about a rank whose process ended"""


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
        return _TIMED_OUT in self.summary


@dataclass(frozen=True)
class Failure:
    """Report of why a rank failed; plain values, to be sent as JSON."""

    kind: Literal["user", "storage", "timeout", "crash", "memory"]
    summary: str
    """one line"""
    text: str = ""
    """with the traceback; empty when there is none"""
    seconds: float = 0.0
    """time of the report, since the epoch; 0: a signal ended the process"""

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Self:
        """Return the failure that an error is.

        Args:
            where: name of the rank; not needed for the errors that `launch` raises.
        """
        if isinstance(error, RunFailed):
            return cls(error.kind, error.summary, error.detail, time.time())
        if isinstance(error, UserError):
            storage = isinstance(error, StorageError)
            return cls("storage" if storage else "user", str(error), seconds=time.time())
        line = traceback.format_exception_only(error)[0].splitlines()[0]
        text = "".join(traceback.format_exception(error)).strip()
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        return cls(
            "memory" if memory else "crash", f"{where}: {line}", f"{where}: {text}", time.time()
        )

    def error(self) -> UserError | RunFailed:
        """Return the exception for the caller of `launch`."""
        if self.kind == "user":
            return UserError(self.summary)
        if self.kind == "storage":
            return StorageError(self.summary)
        return RunFailed(self.kind, self.text or self.summary, self.summary)

    @property
    def waited(self) -> bool:
        """Return whether the rank timed out waiting for another, which is the cause."""
        return _TIMED_OUT in self.summary

    @property
    def is_consequence(self) -> bool:
        """Return whether another rank is the cause: it ended, or did not answer."""
        return self.waited or any(message in self.summary for message in _DISCONNECTED)


def cause_of(reports: Mapping[str, Failure | None]) -> Failure:
    """Return the failure that caused those of the other ranks.

    Args:
        reports: by the names of the ranks, at least one; None for a rank that has not reported.
    """
    failures = sorted(filter(None, reports.values()), key=lambda failure: failure.seconds)
    for failure in failures:
        if not failure.is_consequence:
            return failure
    silent = [name for name, failure in reports.items() if failure is None]
    if silent:
        summary = f"no report from {', '.join(silent)}: {failures[0].summary}"
        return replace(failures[0], kind="crash", summary=summary, text="")
    return failures[0]
