"""Streams, events and page-locked memory of a device, which a simulation can take the place of.

What the library launches on other streams than that of the computation goes through this
interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class Event(ABC):
    """Point in the work of a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the device has come to it; nothing waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait until the device has come to it."""

    @abstractmethod
    def seconds_until(self, end: "Event") -> float:
        """Return the time to a later event; both are `done` and were recorded as timed."""


class Stream(ABC):
    """Queue of work that the device does in order."""

    @abstractmethod
    def record(self, timed: bool = False) -> Event:
        """Return the event after all work that was launched so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let all work that is launched from now on begin after the event; the host goes on."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Launch the work of this thread on this stream while the block runs."""

    @abstractmethod
    def set_device(self) -> None:
        """Make the device of this stream the current one of this thread."""

    @abstractmethod
    def uses(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, when it is freed, from use before this stream's work ends.

        The work is what was launched until then. Without this, the stream that allocated memory
        uses it again at once.
        """


class Accelerator(ABC):
    """A device that works while the host goes on."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which this thread launches."""

    @abstractmethod
    def future(self) -> torch.futures.Future[Any]:
        """Return a future that lets the streams of those who wait for it wait, too.

        They wait for what the stream that sets its result has launched until then.
        """

    @abstractmethod
    def page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return new host memory from and to which the device copies while the host goes on."""

    @abstractmethod
    def page_lock(self, tensor: Tensor) -> None:
        """Turn the host memory of a tensor into such memory; no page of it twice."""

    @abstractmethod
    def page_unlock(self, tensor: Tensor) -> None:
        """Undo `page_lock`, when nothing is copied any more."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy between the device and page-locked memory on the current stream."""
