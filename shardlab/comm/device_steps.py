"""Times of a device's operations, by step, which the host reads when the device has done them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from shardlab.core.accelerator import Accelerator, Event

Read = Callable[[float], None]


class _Span(NamedTuple):
    begin: Event
    end: Event


@dataclass
class _Step:
    begin: Event
    """that times are relative to: as float32 milliseconds, as CUDA gives them, they are exact to a
    microsecond for some seconds only"""
    spans: list[_Span] = field(default_factory=list)

    def events(self) -> list[Event]:
        """Return events after which the device knows all times."""
        # streams beside the computation may end what it has not come to the begin of
        return [self.begin, *(span.end for span in self.spans)]

    def seconds(self) -> float:
        """Return the length of the union of the spans, from the begin of the step on."""
        total = covered = 0.0
        for begin, end in sorted(
            (self.begin.seconds_until(span.begin), self.begin.seconds_until(span.end))
            for span in self.spans
        ):
            total += max(0.0, end - max(begin, covered))
            covered = max(covered, end)
        return total


class DeviceSteps:
    """Operations by the step in which they end for the host, which launches them ahead.

    Streams record when an operation begins and ends, so nothing waits. Any thread may launch
    operations; one begins and ends steps.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._step: _Step | None = None
        """the present one, or the last; none until somebody asks for times of steps"""
        self._ended: deque[tuple[_Step, Read]] = deque()

    def begin(self, accelerator: Accelerator) -> None:
        """Begin a step; what ended since the last one belongs to none."""
        with self._lock:
            self._step = _Step(accelerator.current_stream().record(timed=True))

    def end(self, read: Read) -> None:
        """End the step.

        Args:
            read: called with the seconds in which at least one operation was under way on the
                device, by a later `end` or `settle`.
        """
        with self._lock:
            assert self._step is not None, "it has begun"
            # operations between steps may still end, for nobody
            step, self._step = self._step, _Step(self._step.begin)
        self._ended.append((step, read))
        self._read(wait=False)

    def operation_begins(self, accelerator: Accelerator) -> Event | None:
        """Return the event before an operation; None where nobody asks for times of steps."""
        if self._step is None:
            return None
        return accelerator.current_stream().record(timed=True)

    def operation_ends(self, begin: Event, accelerator: Accelerator) -> None:
        """Count an operation after which the current stream goes on."""
        end = accelerator.current_stream().record(timed=True)
        with self._lock:
            assert self._step is not None, "there was one when the operation began"
            self._step.spans.append(_Span(begin, end))

    def settle(self) -> None:
        """Read the times of all steps that have ended; the host waits for the device."""
        self._read(wait=True)

    def _read(self, wait: bool) -> None:
        while self._ended:
            step, read = self._ended[0]
            for event in step.events():
                if wait:
                    event.synchronize()
                elif not event.done():
                    return
            self._ended.popleft()
            read(step.seconds())
