"""Off-load of activations, which leave the device in forward and return in backward."""

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardlab.comm.background import Background, Running
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError

FOLDER_VARIABLE = "SHARDLAB_ACTIVATIONS"
"""of the environment: the folder of `activations: disk`"""
_MOST_OFFLOADS = 2
"""at once: more would let memory grow where the store is slower than the computation"""


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


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor, after a check that nobody has written to it since it had this version.

    Raises:
        RuntimeError: somebody has, as autograd would say without hooks.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} that backward needs was changed in place after "
            f"forward had saved it (version {tensor._version}, expected {version})"
        )
    return tensor


class _Store:
    """Buffers outside of the device, each of which is freed with its last reference.

    They are mapped temporary files without a name, which are gone with the process, or page-locked
    host memory, which torch allocates again and again.

    Args:
        folder: of the files; None: host memory.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        # with the index of the GPU, as tensors have it; "cuda" has none
        self.device = torch.empty(0, device=device).device
        self._accelerator = accelerator_of(device)
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                raise UserError(
                    f"{folder}: no file can be made there ({error.strerror}): name another folder"
                ) from error

    def allocate(self, size: int) -> Tensor:
        """Return uint8 [size]; raise UserError where there is no space."""
        if self._folder is None:
            return self._host_memory(size)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # reserved: a write to a mapped page that the disk lacks would end the process
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,)))
        except OSError as error:
            raise UserError(
                f"{self._folder}: {size:,} more bytes do not fit ({error.strerror}): make room, "
                "name another folder, or keep this in memory"
            ) from error

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between a buffer and the device, on the current stream."""
        if self._accelerator is None:
            target.copy_(source)
        elif self._folder is None:
            self._accelerator.copy(target, source)
        else:  # a GPU reaches page-locked memory alone, which is used again once it is freed
            staged = self._host_memory(source.numel())
            for to, of in ((staged, source), (target, staged)):
                if to.is_cpu and of.is_cpu:
                    to.copy_(of)
                else:
                    self._accelerator.copy(to, of)
                    self._accelerator.current_stream().synchronize()

    def _host_memory(self, size: int) -> Tensor:
        if self._accelerator is None:
            return torch.empty(size, dtype=torch.uint8)
        return self._accelerator.page_locked((size,), torch.uint8)


class _Activation:
    """A tensor that autograd has saved, on the device or in the store.

    A write to it before it was stored is an error of `finish` and `take`.
    """

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number
        self.uses = 1
        self._device = tensor.device
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._layout = tensor.dtype, tensor.shape, tensor.stride()
        self._stored: Tensor | None = None
        self._written: Running | None = None
        self._loading: tuple[Tensor, Running] | None = None
        # keeps the storage's address, by which activations are found, from being used again
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def __del__(self) -> None:
        # on a GPU memory is used again in the order of the stream that computes
        for running in (self._written, None if self._loading is None else self._loading[1]):
            if running is not None:
                with suppress(Exception):  # nobody needs the bytes any more
                    running.wait()

    def offload(self, store: _Store, thread: Background) -> int:
        """Start to copy the tensor to the store; return its bytes."""
        assert self._tensor is not None, "an activation leaves once"
        tensor = unchanged(self._tensor, self._version)
        elements = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._stored = store.allocate(tensor.nbytes)
        self._written = thread.start(store.copy, self._stored, elements)
        return tensor.nbytes

    def finish(self) -> None:
        """Return when the tensor has been stored; free its memory."""
        if self._written is not None and self._tensor is not None:
            self._written.wait()
            unchanged(self._tensor, self._version)
            self._tensor = self._written = None

    def prefetch(self, store: _Store, thread: Background) -> None:
        """Start to load it ahead of `take`; once, however often it is called."""
        if self._tensor is None and self._loading is None:
            assert self._stored is not None, "it was stored before its memory was freed"
            # allocated by the stream that computes, and so reused in the order of that stream
            buffer = torch.empty(self._stored.numel(), dtype=torch.uint8, device=self._device)
            self._loading = buffer, thread.start(store.copy, buffer, self._stored)

    def take(self, store: _Store, thread: Background) -> Tensor:
        """Return the tensor, as often as it is wanted."""
        if self._tensor is not None:
            return unchanged(self._tensor, self._version)
        self.prefetch(store, thread)
        assert self._loading is not None, "it was prefetched"
        buffer, loaded = self._loading
        loaded.wait()
        self._loading = None
        dtype, shape, stride = self._layout
        tensor = buffer.view(dtype).as_strided(shape, stride)
        if self.uses > 1:  # another operation needs it soon
            self._tensor, self._version = tensor, tensor._version
        return tensor


class SlidingCheckpoint(AbstractContextManager["SlidingCheckpoint"]):
    """Context in which the activations that autograd saves are off-loaded to a store.

    With activation checkpointing (torch.utils.checkpoint) these are the inputs of the checkpointed
    regions; what is recomputed is not saved. Parameters, their views and casts, masks, indices and
    small tensors stay where they are; `kept_bytes` counts them.

    An activation is off-loaded when the next one is saved, so that the last one, which backward
    needs first, stays. When backward takes one, the one before it is prefetched. Several forward
    passes may come before their backward passes, and backward may run inside or outside of the
    block, again with `retain_graph`. A tensor that was changed in place after it was saved is
    refused, as without hooks. Losses and gradients are the same bits.

    Create it by `on_disk` or `in_memory`. One thread copies.
    """

    def __init__(self, store: _Store, minimum_bytes: int = 4096) -> None:
        self.offloaded_bytes = 0
        """of activations that have left the device so far"""
        self.kept_bytes = 0
        """of saved tensors that stayed, parameters aside, each time one was saved"""
        self._store, self._minimum = store, minimum_bytes
        self._thread = Background("activations", store.device)
        self._hooks: saved_tensors_hooks | None = None
        self._count = 0
        self._last: weakref.ref[_Activation] | None = None
        self._offloads: deque[weakref.ref[_Activation]] = deque()
        self._activations: weakref.WeakValueDictionary[int, _Activation] = (
            weakref.WeakValueDictionary()
        )
        self._saved: weakref.WeakValueDictionary[Hashable, _Activation] = (
            weakref.WeakValueDictionary()
        )

    @classmethod
    def on_disk(cls, folder: str | Path, device: torch.device | str | None = None) -> Self:
        """Off-load to temporary files without a name, which are gone with the process.

        Args:
            folder: that holds the files; made if it is not there.
            device: that computes; by default the current GPU where there is one, else the CPU.

        Raises:
            UserError: nothing can be written in `folder`.
        """
        return cls(_Store(_device(device), Path(folder)))

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
        return cls(_Store(found))

    def __enter__(self) -> Self:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the block."""
        assert self._hooks is not None, "it was entered"
        self._hooks.__exit__()
        self._hooks = None

    def _pack(self, tensor: Tensor) -> _Activation | KeptTensor:
        if _is_parameter(tensor):
            return KeptTensor.of(tensor)
        if not self._offloadable(tensor):
            self.kept_bytes += tensor.nbytes
            return KeptTensor.of(tensor)
        if tensor.device != self._store.device:
            raise UserError(
                f"SlidingCheckpoint: an activation is on {tensor.device}, but the store is for "
                f"{self._store.device}: name the device that computes"
            )
        # several operations may save one tensor, which is then off-loaded once
        key = (
            tensor.untyped_storage()._cdata,
            *(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype),
            tensor._version,
        )
        found = self._saved.get(key)
        if found is not None:
            found.uses += 1
            return found
        self._offload_last()
        found = self._saved[key] = self._activations[self._count] = _Activation(tensor, self._count)
        self._last = weakref.ref(found)
        self._count += 1
        return found

    def _offloadable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.requires_grad  # a mask is the same for all regions
            and tensor.is_floating_point()
            and tensor.nbytes >= self._minimum
            and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        )

    def _offload_last(self) -> None:
        last = None if self._last is None else self._last()
        if last is None or self._last is None:
            return
        while len(self._offloads) >= _MOST_OFFLOADS:
            if (before := self._offloads.popleft()()) is not None:
                before.finish()
        self.offloaded_bytes += last.offload(self._store, self._thread)
        self._offloads.append(self._last)

    def _unpack(self, packed: _Activation | KeptTensor) -> Tensor:
        if isinstance(packed, KeptTensor):
            return unchanged(packed.tensor, packed.version)
        before = self._activations.get(packed.number - 1)
        for activation in (packed, before):
            if activation is not None:
                activation.finish()
                activation.prefetch(self._store, self._thread)
        return packed.take(self._store, self._thread)


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view or a cast of one."""
    source = tensor if tensor._base is None else tensor._base
    cast = source.grad_fn
    if cast is not None and cast.name() == "ToCopyBackward0":
        source = getattr(cast.next_functions[0][0], "variable", source)
    return isinstance(source, nn.Parameter)


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
    folder = os.environ.get(FOLDER_VARIABLE, ".work/activations")
    return SlidingCheckpoint.on_disk(folder, device)
