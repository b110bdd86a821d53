"""Streams and events of CUDA. No test has run this on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlab.core.accelerator import Accelerator, Event, Stream


class CudaEvent(Event):
    """Event of CUDA."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:  # noqa: D102
        found: bool = self.event.query()
        return found

    def synchronize(self) -> None:  # noqa: D102
        self.event.synchronize()

    def seconds_until(self, end: Event) -> float:  # noqa: D102
        assert isinstance(end, CudaEvent), "of one device"
        return float(self.event.elapsed_time(end.event)) / 1e3


class CudaStream(Stream):
    """Stream of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, timed: bool = False) -> Event:  # noqa: D102
        return CudaEvent(self._stream.record_event(torch.cuda.Event(enable_timing=timed)))

    def wait(self, event: Event) -> None:  # noqa: D102
        assert isinstance(event, CudaEvent), "of one device"
        self._stream.wait_event(event.event)

    @contextmanager
    def current(self) -> Iterator[None]:  # noqa: D102
        with torch.cuda.stream(self._stream):
            yield

    def set_device(self) -> None:  # noqa: D102
        torch.cuda.set_device(self._stream.device)

    def uses(self, tensor: Tensor) -> None:  # noqa: D102
        tensor.record_stream(self._stream)


class CudaAccelerator(Accelerator):
    """A GPU.

    Args:
        device: with or without an index; without one it is the current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:  # noqa: D102
        return CudaStream(torch.cuda.Stream(self._device))

    def current_stream(self) -> Stream:  # noqa: D102
        return CudaStream(torch.cuda.current_stream(self._device))

    def future(self) -> torch.futures.Future[Any]:  # noqa: D102
        return torch.futures.Future(devices=[self._device])

    def page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: D102
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def page_lock(self, tensor: Tensor) -> None:
        """Page-lock in place: `Tensor.pin_memory` would copy, and allocate a power of two."""
        with torch.cuda.device(self._device):  # else the current GPU would get a context
            result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        torch.cuda.check_error(int(result))

    def page_unlock(self, tensor: Tensor) -> None:  # noqa: D102
        with torch.cuda.device(self._device):
            result = torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        torch.cuda.check_error(int(result))

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        target.copy_(source, non_blocking=True)
