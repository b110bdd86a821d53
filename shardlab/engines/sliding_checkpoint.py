"""Off-load of activations, which leave the device in forward and return in backward."""

import os
import tempfile
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardlab.comm.background import Background, Running
from shardlab.core.errors import UserError
from shardlab.strategy.document import CanonicalStrategy

FOLDER_VARIABLE = "SHARDLAB_ACTIVATIONS"
"""of the environment: the folder of `activations: disk`"""
_MOST_OFFLOADS = 2
"""at once: more would let memory grow where the store is slower than the computation"""


class _Kept(NamedTuple):
    """A saved tensor on the device; `get` checks its version, which autograd does without hooks."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Kept":
        # a tensor that holds its own graph would only go with the garbage collector; a leaf must
        # stay itself, as its data may move before backward (FSDP's parameters)
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def get(self) -> Tensor:
        """Return the tensor; raise RuntimeError if somebody has written to it since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that backward needs was changed in place after"
                f" forward had saved it (version {self.tensor._version}, expected {self.version})"
            )
        return self.tensor


class _Activation:
    """A saved tensor that leaves the device: `kept` is there until it has been stored.

    Args:
        before: the one that was saved before it, which backward needs after it.
    """

    def __init__(self, tensor: Tensor, before: "_Activation | None") -> None:
        self.kept: _Kept | None = _Kept.of(tensor)
        self.device, self.dtype = tensor.device, tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.before = None if before is None else weakref.ref(before)
        self.loading: tuple[Tensor, Running] | None = None
        """the bytes on the device, and their copy"""
        self.stored: Tensor
        self.storing: Running

    def free(self) -> None:
        """Wait until the tensor has been stored; free its memory."""
        if self.kept is not None:
            self.storing.wait()
            self.kept.get()
            self.kept = None


class SlidingCheckpoint(AbstractContextManager["SlidingCheckpoint"]):
    """Context in which the activations that autograd saves are off-loaded to a store.

    With activation checkpointing (torch.utils.checkpoint) these are the inputs of the checkpointed
    regions; what is recomputed is not saved. Parameters, their views and casts, masks, indices and
    small tensors stay where they are; `kept_bytes` counts them.

    The two activations that were saved last stay on the device, as backward needs them first. When
    backward takes one, the one before it is prefetched. Several forward passes may come before
    their backward passes, and backward may run inside or outside of the block, again with
    `retain_graph`. A tensor that was changed in place after it was saved is refused, as without
    hooks. Losses and gradients are the same bits.

    Create it by `on_disk` or `in_memory`. One thread copies. On a CPU peak memory may grow, as the
    C library keeps what is freed (docs/how-to/activations-on-disk.md).

    Args:
        device: that computes.
        folder: of mapped temporary files without a name; None: page-locked host memory.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        folder: Path | None = None,
        minimum_bytes: int = 4096,
    ) -> None:
        if device is None:
            raise UserError("SlidingCheckpoint: create it by on_disk(folder) or in_memory()")
        self.offloaded_bytes = 0
        """of activations that have left the device so far"""
        self.kept_bytes = 0
        """of saved tensors that stayed, parameters aside, each time one was saved"""
        # with the index of the GPU, as tensors have it; "cuda" has none
        self._device = torch.empty(0, device=device).device
        self._folder, self._minimum = folder, minimum_bytes
        self._thread = Background("activations", self._device)
        self._entered: list[saved_tensors_hooks] = []
        self._last: weakref.ref[_Activation] | None = None
        self._offloads: deque[weakref.ref[_Activation]] = deque()

    @classmethod
    def on_disk(cls, folder: str | Path, device: torch.device | str | None = None) -> Self:
        """Off-load to temporary files without a name, which are gone with the process.

        Args:
            folder: that holds the files; made if it is not there.
            device: that computes; by default the current GPU where there is one, else the CPU.

        Raises:
            UserError: nothing can be written in `folder`.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(
                f"{folder}: no file can be made there ({error.strerror}): name another folder"
            ) from error
        return cls(_device(device), folder)

    @classmethod
    def in_memory(cls, device: torch.device | str | None = None) -> Self:
        """Off-load to page-locked host memory.

        Args:
            device: that computes; by default the current GPU.

        Raises:
            UserError: a CPU computes, whose activations are in host memory already.
        """
        found = _device(device)
        if found.type == "cpu":
            raise UserError(
                "SlidingCheckpoint: on a CPU activations are in host memory already: use on_disk"
            )
        return cls(found)

    def __enter__(self) -> Self:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the block."""
        self._entered.pop().__exit__()

    def _pack(self, tensor: Tensor) -> _Activation | _Kept:
        if _is_parameter(tensor):
            return _Kept.of(tensor)
        if not self._offloadable(tensor):
            self.kept_bytes += tensor.nbytes
            return _Kept.of(tensor)
        if tensor.device != self._device:
            raise UserError(
                f"SlidingCheckpoint: an activation is on {tensor.device}, but the store is for "
                f"{self._device}: name the device that computes"
            )
        while len(self._offloads) >= _MOST_OFFLOADS:
            if (oldest := self._offloads.popleft()()) is not None:
                oldest.free()
        activation = _Activation(tensor, None if self._last is None else self._last())
        activation.stored = self._allocate(tensor.nbytes)
        elements = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        activation.storing = self._thread.start(self._copy, activation.stored, elements)
        self.offloaded_bytes += tensor.nbytes
        self._last = weakref.ref(activation)
        self._offloads.append(self._last)
        return activation

    def _offloadable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.requires_grad  # a mask is the same for all regions
            and tensor.is_floating_point()
            and tensor.nbytes >= self._minimum
            and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        )

    def _unpack(self, packed: _Activation | _Kept) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.get()
        before = None if packed.before is None else packed.before()
        for activation in (packed, before):
            if activation is not None:
                self._prefetch(activation)
        if packed.kept is not None:
            return packed.kept.get()
        assert packed.loading is not None, "it was prefetched"
        loaded, running = packed.loading
        running.wait()
        packed.loading = None
        return loaded.view(packed.dtype).as_strided(packed.shape, packed.stride)

    def _prefetch(self, activation: _Activation) -> None:
        """Start to load an activation that has left; once, however often it is called."""
        if activation.kept is None and activation.loading is None:
            # allocated by the stream that computes, and so reused in the order of that stream
            loaded = torch.empty_like(activation.stored, device=activation.device)
            running = self._thread.start(self._copy, loaded, activation.stored)
            activation.loading = loaded, running

    def _allocate(self, size: int) -> Tensor:
        """Return uint8 [size] outside of the device; raise UserError where there is no space."""
        if self._folder is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
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

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the store and the device, in the thread."""
        target.copy_(source, non_blocking=self._folder is None)
        for tensor in (target, source):
            if tensor.is_cuda:  # not to be used again before this copy is done
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


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
