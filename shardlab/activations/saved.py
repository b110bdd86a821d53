"""Tensors that autograd saves for backward, on the device or in a store."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardlab.activations.stores import ActivationStore, StoredTensor, unchanged


class KeptTensor(NamedTuple):
    """A saved tensor that stays on the device; `unchanged` checks its version, as hooks do not."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "KeptTensor":
        """Return what is saved in place of a tensor, without its graph."""
        # a tensor that holds its own graph would only go with the garbage collector; a leaf must
        # stay itself, as its data may move before backward (FSDP's parameters)
        kept = tensor if tensor.is_leaf else tensor.detach()
        return cls(kept, tensor._version)


class Region:
    """Inputs that one call of `checkpoint` has saved."""

    def __init__(self, number: int, frame: Callable[[], object | None]) -> None:
        self.number, self.frame = number, frame
        self.inputs: list[weakref.ref[Input]] = []

    def alive(self) -> list["Input"]:
        """Return the inputs that backward still needs."""
        return [each for ref in self.inputs if (each := ref()) is not None]


class Input:
    """A tensor that one or more regions have saved.

    A write to it in the meantime is an error of `offload` and `take`.
    """

    def __init__(self, tensor: Tensor, store: ActivationStore) -> None:
        self.uses = 0
        self._store = store
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._stored: StoredTensor | None = None
        # keeps the storage's address, by which inputs are found, from being used again
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._stored is not None:
            self._store.drop(self._stored)

    def offload(self) -> None:
        """Start the off-load to the store; once, however often it is called."""
        if self._stored is None and self._tensor is not None:
            self._stored = self._store.put(unchanged(self._tensor, self._version))
            self._tensor = None

    def prefetch(self) -> None:
        """Start to load it ahead of `take`."""
        if self._tensor is None and self._stored is not None:
            self._store.prefetch(self._stored)

    def take(self) -> Tensor:
        """Return the tensor, as often as it is wanted."""
        if self._tensor is not None:
            return unchanged(self._tensor, self._version)
        assert self._stored is not None, "it was off-loaded"
        tensor = self._store.take(self._stored)
        if self.uses > 1:  # another region needs it soon
            self._tensor, self._version = tensor, tensor._version
        return tensor


class Use(NamedTuple):
    """Use of an input by one region."""

    input: Input
    region: Region
