"""Where bytes stay while the device does not need them: host memory, or a file."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.core.errors import UserError
from shardlab.core.progress import say

BLOCK = 4096
"""bytes: what direct I/O wants addresses, offsets and lengths to be multiples of"""


class Full(UserError):
    """A medium has no room left."""


class Place(ABC):
    """Room for a number of bytes; the same ones are read as often as wanted.

    What reads and writes may only be launched when the calls return, on the current stream. Who
    calls orders them: a read begins after the write that it wants to see.
    """

    @abstractmethod
    def write(self, source: Tensor) -> None:
        """Takes uint8 [size] of any device.

        Raises:
            OSError, UserError: bytes were not taken.
        """

    @abstractmethod
    def read(self, out: Tensor) -> None:
        """Fills uint8 [size rounded up to whole blocks], made by `blocks`, beyond `size` with
        anything.

        Raises:
            OSError: bytes did not come back.
        """

    @abstractmethod
    def free(self) -> None:
        """Gives the room back; nothing is under way."""


class Medium(ABC):
    """Room without names: it is gone with the process, however that ends."""

    @abstractmethod
    def reserve(self, size: int) -> Place:
        """Room that is there for certain.

        Raises:
            Full: there is none; with the fix.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives all room back; no place is used again."""


class HostMedium(Medium):
    """Host memory, pinned where a GPU copies from it; used again, since pinning is slow."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._spare: list[Tensor] = []

    def reserve(self, size: int) -> Place:  # noqa: D102
        fitting = [each for each in self._spare if size <= each.numel() <= 2 * size]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._spare = [each for each in self._spare if each is not buffer]
        else:
            # other sizes are wanted now: keeping the old ones would add up
            self._spare.clear()
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        return _HostPlace(buffer, size, self._spare.append)

    def close(self) -> None:  # noqa: D102
        self._spare.clear()


class _HostPlace(Place):
    def __init__(self, buffer: Tensor, size: int, give_back: Callable[[Tensor], None]) -> None:
        self._buffer, self._size, self._give_back = buffer, size, give_back

    def write(self, source: Tensor) -> None:
        self._buffer[: self._size].copy_(source, non_blocking=True)

    def read(self, out: Tensor) -> None:
        out[: self._size].copy_(self._buffer[: self._size], non_blocking=True)

    def free(self) -> None:
        self._give_back(self._buffer)


class Spill(Medium):
    """A medium and, from when it is full, another one; says so once."""

    def __init__(self, first: Medium, second: Medium) -> None:
        self._first, self._second = first, second
        self._said = False

    def reserve(self, size: int) -> Place:  # noqa: D102
        try:
            return self._first.reserve(size)
        except Full as full:
            if not self._said:
                say(f"{full}; host memory takes the rest")
                self._said = True
            return self._second.reserve(size)

    def close(self) -> None:  # noqa: D102
        self._first.close()
        self._second.close()


def whole_blocks(size: int) -> int:
    """The bytes of as many blocks as `size` bytes need, at least one."""
    return max(1, -(-size // BLOCK)) * BLOCK


def blocks(size: int, device: torch.device, pin: bool = False) -> Tensor:
    """uint8 [size rounded up to whole blocks] that begins at a multiple of `BLOCK`."""
    whole = whole_blocks(size)
    buffer = torch.empty(whole + BLOCK, dtype=torch.uint8, device=device, pin_memory=pin)
    begin = -buffer.data_ptr() % BLOCK
    return buffer[begin : begin + whole]
