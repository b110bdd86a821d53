"""What is kept of a tensor that autograd saves, on the device or in a store."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardlab.activations.stores import ActivationStore, Ticket, unchanged


class Stays(NamedTuple):
    """A saved tensor that is none of ours; hooks turn the check of its version off."""

    tensor: Tensor
    version: int

    @classmethod
    def made_of(cls, tensor: Tensor) -> "Stays":
        """What is kept in its place, without a graph of its own."""
        # what holds its own graph would only go with the garbage collector; leaves may get others'
        # memory before backward, as FSDP's parameters do
        kept = tensor if tensor.is_leaf else tensor.detach()
        return cls(kept, tensor._version)


class Region:
    """What one call of `checkpoint` has saved."""

    def __init__(self, number: int, frame: Callable[[], object | None]) -> None:
        self.number, self.frame = number, frame
        self.inputs: list[weakref.ref[Input]] = []

    def alive(self) -> list["Input"]:
        """Inputs that backward still needs."""
        return [each for ref in self.inputs if (each := ref()) is not None]


class Input:
    """A tensor that one or more regions have saved.

    Whoever writes to it is told so when it leaves or is taken.
    """

    def __init__(self, tensor: Tensor, store: ActivationStore) -> None:
        self.uses = 0
        self._store = store
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._ticket: Ticket | None = None
        # no other storage gets this one's address, under which the input is found
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._ticket is not None:
            self._store.drop(self._ticket)

    def leave(self) -> None:
        """Lets it go to the store; once, however often it is called."""
        if self._ticket is None and self._tensor is not None:
            self._ticket = self._store.put(unchanged(self._tensor, self._version))
            self._tensor = None

    def fetch(self) -> None:
        """Lets it come back ahead of `take`."""
        if self._tensor is None and self._ticket is not None:
            self._store.prefetch(self._ticket)

    def take(self) -> Tensor:
        """The tensor, as often as it is wanted."""
        if self._tensor is not None:
            return unchanged(self._tensor, self._version)
        assert self._ticket is not None, "it has left"
        tensor = self._store.take(self._ticket)
        if self.uses > 1:  # another region needs it soon
            self._tensor, self._version = tensor, tensor._version
        return tensor


class Use(NamedTuple):
    """An input as one region has saved it."""

    input: Input
    region: Region
