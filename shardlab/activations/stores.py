"""Stores that tensors leave to and come back from, beside computation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardlab.activations.files import FileMedium
from shardlab.activations.storage import HostMedium, Medium, Place, Spill, blocks
from shardlab.transport.background import Background, Running, drain_all

WhenFull = Literal["error", "memory"]

_CPU = torch.device("cpu")
_LEAVING = 2
"""tensors on their way out at once: what a step has more of waits, so that memory stays bounded"""


@dataclass(eq=False)
class Ticket:
    """Of one tensor in a store."""

    place: Place
    size: int
    """bytes"""
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    source: Tensor | None
    """until it has left"""
    version: int
    left: Running
    arriving: tuple[Tensor, Running] | None = None


class ActivationStore:
    """Tensors of one device that are kept in a medium until they are needed again.

    Laws:
    - `take` gives the bits, shape, strides and type that `put` was given, on the same device;
    - the device's memory of a tensor is free after at most so many more `put` as may be under way,
      and not before all of it was read;
    - no call blocks but `take` when the bytes are not there yet, and `put` when the medium is
      slower than the computation;
    - an error of a thread is raised by the next call, and by all that follow.

    On a GPU all this is in the order of streams: the host waits for launches only.
    One thread at a time calls `put`, `prefetch`, `take` and `close`.

    Args:
        medium: that `close` closes, too.
        device: of the tensors.
    """

    def __init__(self, medium: Medium, device: torch.device = _CPU) -> None:
        # tensors say which GPU they are on, and nobody else has to
        self.device = torch.empty(0, device=device).device
        self._medium = medium
        self._out, self._in = Background("leave", device), Background("return", device)
        self._leaving: deque[Ticket] = deque()
        self._dropped: deque[Ticket] = deque()

    def put(self, tensor: Tensor) -> Ticket:
        """Lets a tensor leave. Nobody writes to it before it has left.

        Args:
            tensor: of the store's device, with its elements side by side in memory.

        Raises:
            Full: the medium has no room left.
            RuntimeError: a tensor was written to before it had left.
        """
        self._tidy()
        while len(self._leaving) >= _LEAVING:
            _leave(self._leaving.popleft())
        elements = tensor.detach().as_strided((tensor.numel(),), (1,))
        place = self._medium.reserve(tensor.nbytes)
        left = self._out.start(place.write, elements.view(torch.uint8))
        ticket = Ticket(
            place,
            tensor.nbytes,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.detach(),
            tensor._version,
            left,
        )
        self._leaving.append(ticket)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Lets a tensor come back ahead of `take`; once, however often it is called."""
        self._tidy()
        if ticket.source is None and ticket.arriving is None:
            # of the stream that computes: its memory is used again in the order of that stream
            room = blocks(ticket.size, self.device)
            ticket.arriving = room, self._in.start(ticket.place.read, room)

    def take(self, ticket: Ticket) -> Tensor:
        """The tensor, as often as it is wanted.

        Raises:
            RuntimeError: it was written to before it had left.
        """
        self.prefetch(ticket)
        if ticket.source is not None:
            return unchanged(ticket.source, ticket.version)
        assert ticket.arriving is not None, "it was prefetched"
        room, arrived = ticket.arriving
        arrived.wait()
        ticket.arriving = None
        elements = room[: ticket.size].view(ticket.dtype)
        return elements.as_strided(ticket.shape, ticket.stride)

    def drop(self, ticket: Ticket) -> None:
        """Nobody takes it any more; its room is free by the next call. For any thread."""
        self._dropped.append(ticket)

    def close(self) -> None:
        """Gives the room of all tensors back."""
        try:
            drain_all(self._out, self._in)
        finally:
            self._medium.close()

    def _tidy(self) -> None:
        """Raises errors of threads; frees what was dropped and is no longer on its way."""
        self._out.check()
        self._in.check()
        for _ in range(len(self._dropped)):
            ticket = self._dropped.popleft()
            arriving = () if ticket.arriving is None else (ticket.arriving[1],)
            if all(each.went_well for each in (ticket.left, *arriving)):
                for each in (ticket.left, *arriving):
                    each.wait()  # what is launched from now on comes after it
                ticket.source = ticket.arriving = None
                ticket.place.free()
            else:
                self._dropped.append(ticket)


class HostStore(ActivationStore):
    """In host memory, which is pinned for a GPU and used again."""

    def __init__(self, device: torch.device = _CPU) -> None:
        super().__init__(HostMedium(device), device)


class FileStore(ActivationStore):
    """In a file without a name, past the page cache where the file system allows it.

    Args:
        folder: that holds it; made if it is not there.
        when_full: what happens when the disk is full: an error, or host memory takes the rest.

    Raises:
        UserError: nothing can be written in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device = _CPU,
        when_full: WhenFull = "error",
    ) -> None:
        medium: Medium = FileMedium(folder, device)
        if when_full == "memory":
            medium = Spill(medium, HostMedium(device))
        super().__init__(medium, device)


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """The tensor, which nobody has written to since it had this version.

    Raises:
        RuntimeError: somebody has, as autograd would say without hooks.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} that backward needs was changed in place after "
            f"forward had saved it (version {tensor._version}, expected {version})"
        )
    return tensor


def _leave(ticket: Ticket) -> None:
    """Returns when a tensor has left; frees its memory."""
    ticket.left.wait()
    if ticket.source is not None:
        unchanged(ticket.source, ticket.version)
        ticket.source = None
