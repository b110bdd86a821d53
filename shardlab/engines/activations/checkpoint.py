"""Inputs of checkpointed blocks leave the device in forward and return just ahead of backward."""

import os
import sys
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from shardlab.core.errors import UserError
from shardlab.core.strategy import Strategy
from shardlab.engines.activations.stores import (
    ActivationStore,
    FileStore,
    HostStore,
    Ticket,
    unchanged,
)

FOLDER_VARIABLE = "SHARDLAB_ACTIVATIONS"
"""of the environment: see `scratch_folder`"""

_SAVE_INPUTS = checkpoint._CheckpointFrame.save_inputs.__code__


class SlidingCheckpoint(AbstractContextManager["SlidingCheckpoint"]):
    """While the block runs, inputs of checkpointed regions are kept in a store.

    Works with `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which saves the inputs
    of a region through hooks like these (torch/utils/checkpoint.py, `_CheckpointFrame`); what other
    operations save, and what a policy of selective checkpointing keeps, stays where it is.

    An input leaves when the next region begins, so that the last one, which backward needs first,
    never does. When backward takes the inputs of a region, those of the region before it are
    fetched. Several forward passes may come before their backward passes, and backward may run
    inside or outside of the block, again with `retain_graph`. Input changed in place after it was
    saved is refused when it is seen, as without hooks.

    Args:
        store: of the device of the inputs; somebody else closes it.
        minimum_bytes: smaller tensors stay.
    """

    def __init__(self, store: ActivationStore, minimum_bytes: int = 4096) -> None:
        self._store, self._minimum = store, minimum_bytes
        self._hooks: saved_tensors_hooks | None = None
        self._saved = self._checkpointed = False
        self._last = _Region(-1, lambda: None)
        self._regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
        self._inputs: weakref.WeakValueDictionary[Hashable, _Input] = weakref.WeakValueDictionary()

    def __enter__(self) -> "SlidingCheckpoint":
        if self._hooks is not None:
            raise RuntimeError("this SlidingCheckpoint is entered already")
        self._saved = self._checkpointed = False
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the block.

        Raises:
            UserError: it saved tensors for backward, but checkpointed nothing that could leave.
        """
        assert self._hooks is not None, "it was entered"
        self._hooks.__exit__()
        self._hooks = None
        if error is None and self._saved and not self._checkpointed:
            raise UserError(
                "SlidingCheckpoint: nothing was checkpointed, so no activation can leave: use "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False, outside of "
                "torch.compile"
            )

    def _pack(self, tensor: Tensor) -> "_Use | _Stays":
        frame = _saving_frame()
        self._saved = True
        self._checkpointed = self._checkpointed or frame is not None
        if frame is None or not self._leaves(tensor):
            return _Stays.made_of(tensor)
        if self._last.frame() is not frame:
            self._begin_region(frame)
        key = (
            tensor.untyped_storage()._cdata,
            *(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype),
            tensor._version,
        )
        found = self._inputs.get(key)
        if found is None:
            found = self._inputs[key] = _Input(tensor, self._store)
        found.uses += 1
        self._last.inputs.append(weakref.ref(found))
        return _Use(found, self._last)

    def _leaves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.requires_grad  # a mask is the same for all regions
            and tensor.is_floating_point()
            and tensor.device == self._store.device
            and tensor.nbytes >= self._minimum
            and not isinstance(tensor._base, nn.Parameter)
            and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        )

    def _begin_region(self, frame: object) -> None:
        for each in self._last.alive():
            each.leave()
        self._last = _Region(self._last.number + 1, weakref.ref(frame))
        self._regions[self._last.number] = self._last

    def _unpack(self, packed: "_Use | _Stays") -> Tensor:
        if isinstance(packed, _Stays):
            return unchanged(packed.tensor, packed.version)
        for region in (packed.region, self._regions.get(packed.region.number - 1)):
            for each in () if region is None else region.alive():
                each.fetch()
        return packed.input.take()


class _Stays(NamedTuple):
    """A saved tensor that is none of ours; hooks turn the check of its version off."""

    tensor: Tensor
    version: int

    @classmethod
    def made_of(cls, tensor: Tensor) -> "_Stays":
        # what holds its own graph would only go with the garbage collector; leaves may get others'
        # memory before backward, as FSDP's parameters do
        kept = tensor if tensor.is_leaf else tensor.detach()
        return cls(kept, tensor._version)


class _Region:
    """What one call of `checkpoint` has saved."""

    def __init__(self, number: int, frame: Callable[[], object | None]) -> None:
        self.number, self.frame = number, frame
        self.inputs: list[weakref.ref[_Input]] = []

    def alive(self) -> list["_Input"]:
        """Inputs that backward still needs."""
        return [each for ref in self.inputs if (each := ref()) is not None]


class _Input:
    """A tensor that one or more regions have saved."""

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
        if self._ticket is None and self._tensor is not None:
            self._ticket = self._store.put(unchanged(self._tensor, self._version))
            self._tensor = None

    def fetch(self) -> None:
        if self._tensor is None and self._ticket is not None:
            self._store.prefetch(self._ticket)

    def take(self) -> Tensor:
        if self._tensor is not None:
            return unchanged(self._tensor, self._version)
        assert self._ticket is not None, "it has left"
        tensor = self._store.take(self._ticket)
        if self.uses > 1:  # another region needs it soon
            self._tensor, self._version = tensor, tensor._version
        return tensor


class _Use(NamedTuple):
    """An input as one region has saved it."""

    input: _Input
    region: _Region


def _saving_frame() -> object | None:
    """The frame of `checkpoint` that saves its inputs through the hook that asks, if one does."""
    caller = sys._getframe(2)
    for _ in range(2):  # before Python 3.12 a comprehension is a call
        if caller.f_code is _SAVE_INPUTS:
            return cast(object, caller.f_locals["self"])
        if caller.f_back is None:
            return None
        caller = caller.f_back
    return None


def sliding(strategy: Strategy, device: torch.device) -> AbstractContextManager[Any]:
    """What a strategy's forward passes run in, so that its `activations` are where it says.

    Raises:
        UserError: nothing can be written in the folder of `activations: disk`.
    """
    if strategy.activations == "device":
        return nullcontext()
    if strategy.activations == "memory":
        return SlidingCheckpoint(HostStore(device))
    return SlidingCheckpoint(FileStore(scratch_folder(), device))


def scratch_folder() -> Path:
    """Where `activations: disk` and `moments: disk` are."""
    return Path(os.environ.get(FOLDER_VARIABLE, ".work/activations"))
