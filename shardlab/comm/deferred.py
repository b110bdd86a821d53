"""Values and times that a device knows and the host reads later, many by one copy.

A host that reads a value waits for everything that the device has yet to do before it. So counts,
checks and times of messages stay on the device until `EVERY` of them are there; one copy beside the
computation brings them, and they are read when it has arrived.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardlab.core.accelerator import Accelerator, Event, Stream
from shardlab.core.device import accelerator_of

EVERY = 1024
"""values that are copied together"""

A = TypeVar("A")
Read = Callable[[A, float], None]
"""what happens with the value, which is counted in an account"""


@dataclass(eq=False)
class _Entry(Generic[A]):
    account: A
    read: Read[A]
    known: Event
    """after which the value is computed"""
    value: Tensor | None = None
    """[] on the device; None: the time since `begin`"""
    begin: Event | None = None

    def number(self, values: "_Values") -> float:
        """Return the time, or the next of the values of its type."""
        if self.value is not None:
            return next(values[self.value.dtype])
        assert self.begin is not None, "of a time"
        return self.begin.seconds_until(self.known)


_Values = dict[torch.dtype, Iterator[float]]


class _Batch(NamedTuple, Generic[A]):
    values: dict[torch.dtype, Tensor]
    """on the host, once the event is done; by type, as one operator stacks them"""
    arrived: Event
    entries: list[_Entry[A]]


class Deferred(Generic[A]):
    """Values of one device, and what to do with each; on a CPU all are read at once.

    Any thread may call. An error that a value causes is raised by the call that reads it: soon
    after its cause, and at the latest by `settle`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._accelerator: Accelerator | None = None
        self._stream: Stream | None = None
        self._waiting: list[_Entry[A]] = []
        self._copied: deque[_Batch[A]] = deque()

    def value(self, account: A, value: Tensor, read: Read[A]) -> None:
        """Read a number, now or later.

        Args:
            value: [], computed by the current stream of this thread.
        """
        if (accelerator := accelerator_of(value.device)) is None:
            read(account, value.item())
        else:
            known = accelerator.current_stream().record()
            self._add(accelerator, _Entry(account, read, known, value))

    @contextmanager
    def seconds(self, account: A, device: torch.device, read: Read[A]) -> Iterator[None]:
        """Time the block: wall time on a CPU, that of the current stream's work on a device."""
        if (accelerator := accelerator_of(device)) is None:
            start = perf_counter()
            yield
            read(account, perf_counter() - start)
            return
        stream = accelerator.current_stream()
        begin = stream.record(timed=True)
        yield
        self._add(accelerator, _Entry(account, read, stream.record(timed=True), begin=begin))

    def move(self, source: A, target: A) -> None:
        """Count in another account what was not read yet."""
        with self._lock:
            for entry in [*self._waiting, *(each for b in self._copied for each in b.entries)]:
                if entry.account is source:
                    entry.account = target

    def settle(self) -> None:
        """Read everything; the host waits for the device."""
        with self._lock:
            self._copy()
            self._read(wait=True)

    def _add(self, accelerator: Accelerator, entry: _Entry[A]) -> None:
        with self._lock:
            self._accelerator = accelerator
            self._waiting.append(entry)
            if len(self._waiting) >= EVERY:
                self._copy()
            self._read(wait=False)

    def _copy(self) -> None:
        """Start to copy the values that wait, on a stream of its own: no other one waits for it."""
        if not self._waiting:
            return
        assert self._accelerator is not None, "set with the first value"
        if self._stream is None:
            self._stream = self._accelerator.stream()
        entries, self._waiting = self._waiting, []
        for entry in entries:
            self._stream.wait(entry.known)
        # the entries keep the values alive until the copy has arrived
        values: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for entry in entries:
            if entry.value is not None:
                values[entry.value.dtype].append(entry.value)
        with self._stream.current():
            # stacked by the stream that copies, in whose order the memory is used again
            copies = {
                dtype: _to_host(self._accelerator, torch.stack(same))
                for dtype, same in values.items()
            }
        self._copied.append(_Batch(copies, self._stream.record(), entries))

    def _read(self, wait: bool) -> None:
        error: BaseException | None = None
        while self._copied and (wait or self._copied[0].arrived.done()):
            batch = self._copied.popleft()
            if wait:
                batch.arrived.synchronize()
            numbers = {dtype: iter(values.tolist()) for dtype, values in batch.values.items()}
            for entry in batch.entries:
                found = entry.number(numbers)
                try:
                    entry.read(entry.account, found)
                except Exception as each:  # the others are counted all the same
                    error = error or each
        if error is not None:
            raise error


def _to_host(accelerator: Accelerator, values: Tensor) -> Tensor:
    host = accelerator.page_locked(values.shape, values.dtype)
    accelerator.copy(host, values)
    return host
