"""Activation checkpointing whose inputs are off-loaded in forward and return before backward."""

import os
import sys
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.engines.activation_stores import (
    ActivationStore,
    FileStore,
    HostStore,
    KeptTensor,
    StoredTensor,
    WhenFull,
    unchanged,
)

FOLDER_VARIABLE = "SHARDLAB_ACTIVATIONS"
"""of the environment: see `scratch_folder`"""

_SAVE_INPUTS = checkpoint._CheckpointFrame.save_inputs.__code__


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


class SlidingCheckpoint(AbstractContextManager["SlidingCheckpoint"]):
    """Context in which inputs of checkpointed regions are off-loaded to a store.

    Works with `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which saves the inputs
    of a region through hooks like these (torch/utils/checkpoint.py, `_CheckpointFrame`); what other
    operations save, and what a policy of selective checkpointing keeps, stays where it is.

    An input is off-loaded when the next region begins, so the last one, which backward needs first,
    never is. When backward takes the inputs of a region, those of the region before it are
    prefetched. Several forward passes may come before their backward passes, and backward may run
    inside or outside of the block, again with `retain_graph`. An input that was changed in place
    after it was saved is refused, as without hooks.

    `on_disk` and `in_memory` create it with a store, whose space is freed with the last
    reference to the context.

    Args:
        store: of the device of the inputs; the caller closes it.
        minimum_bytes: smaller tensors stay on the device.
    """

    def __init__(self, store: ActivationStore, minimum_bytes: int = 4096) -> None:
        self._store, self._minimum = store, minimum_bytes
        self._hooks: saved_tensors_hooks | None = None
        self._saved = self._checkpointed = False
        self._last = Region(-1, lambda: None)
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._inputs: weakref.WeakValueDictionary[Hashable, Input] = weakref.WeakValueDictionary()

    @classmethod
    def on_disk(
        cls,
        folder: str | Path,
        device: torch.device | str | None = None,
        when_full: WhenFull = "error",
    ) -> Self:
        """Off-load to an unlinked temporary file, which is gone with the process.

        Args:
            folder: that holds the file; made if it is not there.
            device: that computes; by default the current GPU where there is one, else the CPU.
            when_full: what happens when the disk is full: an error, or host memory takes the rest.

        Raises:
            UserError: nothing can be written in `folder`.
        """
        return cls(FileStore(Path(folder), _device(device), when_full))

    @classmethod
    def in_memory(cls, device: torch.device | str | None = None) -> Self:
        """Off-load to page-locked host memory.

        Args:
            device: that computes; by default the current GPU.

        Raises:
            UserError: a CPU computes, whose activations are in host memory already.
        """
        found = _device(device)
        if accelerator_of(found) is None:
            raise UserError(
                "SlidingCheckpoint: on a CPU activations are in host memory already: use on_disk"
            )
        return cls(HostStore(found))

    def __enter__(self) -> Self:
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
        """Leave the block.

        Raises:
            UserError: it saved tensors for backward, but checkpointed nothing that could leave.
        """
        assert self._hooks is not None, "it was entered"
        self._hooks.__exit__()
        self._hooks = None
        if error is None and self._saved and not self._checkpointed:
            raise UserError(
                "SlidingCheckpoint: nothing was checkpointed, so nothing can be off-loaded: use "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False, outside of "
                "torch.compile"
            )

    def _pack(self, tensor: Tensor) -> Use | KeptTensor:
        frame = _saving_frame()
        self._saved = True
        self._checkpointed = self._checkpointed or frame is not None
        if frame is None or not self._offloadable(tensor):
            return KeptTensor.of(tensor)
        if tensor.device != self._store.device:
            raise UserError(
                f"SlidingCheckpoint: an input is on {tensor.device}, but the store is for "
                f"{self._store.device}: name the device that computes"
            )
        if self._last.frame() is not frame:
            self._begin_region(frame)
        # several regions may save one tensor, which is then off-loaded once
        key = (
            tensor.untyped_storage()._cdata,
            *(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype),
            tensor._version,
        )
        found = self._inputs.get(key)
        if found is None:
            found = self._inputs[key] = Input(tensor, self._store)
        found.uses += 1
        self._last.inputs.append(weakref.ref(found))
        return Use(found, self._last)

    def _offloadable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.requires_grad  # a mask is the same for all regions
            and tensor.is_floating_point()
            and tensor.nbytes >= self._minimum
            and not isinstance(tensor._base, nn.Parameter)
            and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        )

    def _begin_region(self, frame: object) -> None:
        for each in self._last.alive():
            each.offload()
        self._last = Region(self._last.number + 1, weakref.ref(frame))
        self._regions[self._last.number] = self._last

    def _unpack(self, packed: Use | KeptTensor) -> Tensor:
        if isinstance(packed, KeptTensor):
            return unchanged(packed.tensor, packed.version)
        for region in (packed.region, self._regions.get(packed.region.number - 1)):
            for each in () if region is None else region.alive():
                each.prefetch()
        return packed.input.take()


def _saving_frame() -> object | None:
    """Return the `_CheckpointFrame` that saves its inputs through the calling hook, if one does.

    Hooks do not know what they are called for, so this looks at the caller's code.
    """
    caller = sys._getframe(2)
    for _ in range(2):  # before Python 3.12 a comprehension is a call
        if caller.f_code is _SAVE_INPUTS:
            return cast(object, caller.f_locals["self"])
        if caller.f_back is None:
            return None
        caller = caller.f_back
    return None


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def activation_offload(
    strategy: CanonicalStrategy, device: torch.device
) -> AbstractContextManager[Any]:
    """Return the context of forward passes that puts activations where a strategy says.

    Raises:
        UserError: nothing can be written in the folder of `activations: disk`.
    """
    if strategy.activations == "device":
        return nullcontext()
    if strategy.activations == "memory":
        return SlidingCheckpoint.in_memory(device)
    return SlidingCheckpoint.on_disk(scratch_folder(), device)


def scratch_folder() -> Path:
    """Return the folder of `activations: disk` and `moments: disk`."""
    return Path(os.environ.get(FOLDER_VARIABLE, ".work/activations"))
