"""A device that computes nothing: every read of a value by the host is an error.

`PrivateUse1` is torch's place for devices from outside; tensors on it are FakeTensors, which have
shapes and no values. The registration is for a whole process, so tests run this in one of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shardlab.core.accelerator import Accelerator, Event, Stream
from shardlab.core.device import replaced

DEVICE = torch.device("privateuseone", 0)


class NoEvent(Event):
    """Event at which a device that computes nothing has not arrived."""

    def done(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    def seconds_until(self, end: Event) -> float:
        raise AssertionError("the host reads a time")


class NoStream(Stream):
    """Stream without an order."""

    def record(self, timed: bool = False) -> Event:
        return NoEvent()

    def wait(self, event: Event) -> None: ...

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def set_device(self) -> None: ...

    def uses(self, tensor: Tensor) -> None: ...


class NoAccelerator(Accelerator):
    """Accelerator of such streams."""

    def stream(self) -> Stream:
        return NoStream()

    def current_stream(self) -> Stream:
        return NoStream()

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise AssertionError("fewer values than are copied together")

    def page_lock(self, tensor: Tensor) -> None:
        raise AssertionError("no engine")

    page_unlock = page_lock

    def copy(self, target: Tensor, source: Tensor) -> None:
        raise AssertionError("fewer values than are copied together")


class NoCopies(TorchDispatchMode):
    """Refuses copies between the device and memory that is not page-locked: the host waits for
    them, and FakeTensors allow them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(("aten._to_copy", "aten.copy_")):
            source = args[1] if "copy_." in str(func) else args[0]
            if source.device.type != out.device.type:
                raise AssertionError(f"{func} from {source.device.type} to {out.device.type}")
        return out


def register() -> None:
    """Make this process one of four ranks with such a device each; others send nothing."""
    _setup_privateuseone_for_python_backend()
    backends = f"cpu:fake,{DEVICE.type}:fake"
    dist.init_process_group(backends, rank=0, world_size=4, store=FakeStore())


@contextmanager
def no_reads() -> Iterator[None]:
    """Raise an error at every read by the host while the block runs."""
    with FakeTensorMode(), NoCopies(), replaced(DEVICE.type, NoAccelerator()):
        yield
