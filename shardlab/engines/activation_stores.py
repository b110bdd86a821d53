"""Stores to which tensors are off-loaded, and from which they return, during computation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running, drain_all
from shardlab.engines.activation_storage import (
    Allocation,
    FallbackStorage,
    FileStorage,
    HostStorage,
    Storage,
)
from shardlab.engines.anonymous_file import aligned_blocks

WhenFull = Literal["error", "memory"]

_CPU = torch.device("cpu")
_MOST_OFFLOADS = 2
"""at once: `put` waits before it starts more, so that memory stays bounded"""


@dataclass(eq=False)
class StoredTensor:
    """One tensor in a store."""

    allocation: Allocation
    size: int
    """bytes"""
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    source: Tensor | None
    """until it has been written"""
    version: int
    written: Running
    loading: tuple[Tensor, Running] | None = None


class ActivationStore:
    """Off-loaded tensors of one device, in a storage until they are needed again.

    Laws:
    - `take` returns the bits, shape, strides and type that `put` was given, on the same device;
    - the device's memory of a tensor is free after at most so many more `put` as off-loads may run
      at once, and not before all of it was read;
    - no call blocks but `take` when the bytes are not there yet, and `put` when the storage is
      slower than the computation;
    - an error of a thread is raised by the next call, and by all that follow.

    On a GPU all this is in the order of streams: the host waits for launches only.
    One thread at a time calls `put`, `prefetch`, `take` and `close`.

    Args:
        storage: that `close` closes, too.
        device: of the tensors.
    """

    def __init__(self, storage: Storage, device: torch.device = _CPU) -> None:
        # with the index of the GPU, as tensors have it; "cuda" has none
        self.device = torch.empty(0, device=device).device
        self._storage = storage
        self._out, self._in = Background("offload", device), Background("reload", device)
        self._offloads: deque[StoredTensor] = deque()
        self._dropped: deque[StoredTensor] = deque()

    def put(self, tensor: Tensor) -> StoredTensor:
        """Start the off-load of a tensor. Nobody may write to it before it is done.

        Args:
            tensor: of the store's device, non-overlapping and dense in memory.

        Raises:
            StorageFull: the storage has no space left.
            RuntimeError: a tensor was written to before its off-load was done.
        """
        self._tidy()
        while len(self._offloads) >= _MOST_OFFLOADS:
            _finish(self._offloads.popleft())
        elements = tensor.detach().as_strided((tensor.numel(),), (1,))
        allocation = self._storage.allocate(tensor.nbytes)
        stored = StoredTensor(
            allocation,
            tensor.nbytes,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            source=tensor.detach(),
            version=tensor._version,
            written=self._out.start(allocation.write, elements.view(torch.uint8)),
        )
        self._offloads.append(stored)
        return stored

    def prefetch(self, stored: StoredTensor) -> None:
        """Start to load a tensor ahead of `take`; once, however often it is called."""
        self._tidy()
        if stored.source is None and stored.loading is None:
            # allocated by the stream that computes, and so reused in the order of that stream
            buffer = aligned_blocks(stored.size, self.device)
            stored.loading = buffer, self._in.start(stored.allocation.read, buffer)

    def take(self, stored: StoredTensor) -> Tensor:
        """Return the tensor, as often as it is wanted.

        Raises:
            RuntimeError: it was written to before its off-load was done.
        """
        self.prefetch(stored)
        if stored.source is not None:
            return unchanged(stored.source, stored.version)
        assert stored.loading is not None, "it was prefetched"
        buffer, loaded = stored.loading
        loaded.wait()
        stored.loading = None
        elements = buffer[: stored.size].view(stored.dtype)
        return elements.as_strided(stored.shape, stored.stride)

    def drop(self, stored: StoredTensor) -> None:
        """Free a tensor that nobody takes any more, by the next call. Any thread may call."""
        self._dropped.append(stored)

    def close(self) -> None:
        """Free the space of all tensors."""
        try:
            drain_all(self._out, self._in)
        finally:
            self._storage.close()  # also after an error, but never while threads use it

    def _tidy(self) -> None:
        """Raise errors of threads; free what was dropped and is no longer in progress."""
        self._out.check()
        self._in.check()
        for _ in range(len(self._dropped)):
            stored = self._dropped.popleft()
            loading = () if stored.loading is None else (stored.loading[1],)
            if all(each.went_well for each in (stored.written, *loading)):
                for each in (stored.written, *loading):
                    each.wait()  # what is launched from now on comes after it
                stored.source = stored.loading = None
                stored.allocation.free()
            else:
                self._dropped.append(stored)


class HostStore(ActivationStore):
    """Store in host memory, which is page-locked for a GPU and reused."""

    def __init__(self, device: torch.device = _CPU) -> None:
        super().__init__(HostStorage(device), device)


class FileStore(ActivationStore):
    """Store in an unlinked temporary file, by direct I/O where the file system allows it.

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
        storage: Storage = FileStorage(folder, device)
        if when_full == "memory":
            storage = FallbackStorage(storage, HostStorage(device))
        super().__init__(storage, device)


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


def _finish(stored: StoredTensor) -> None:
    """Return when a tensor has been written; free its memory."""
    stored.written.wait()
    if stored.source is not None:
        unchanged(stored.source, stored.version)
        stored.source = None
