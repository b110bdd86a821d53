"""Streams, events and page-locked memory of a device, which a simulation can take the place of.

Everything that the library launches beside the computation goes through this interface.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

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


class Accelerator(ABC):
    """A device that works while the host goes on."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which this thread launches."""

    @abstractmethod
    def to_host(self, values: Tensor) -> Tensor:
        """Return a page-locked copy; complete at the next event of the current stream."""
