"""Counts the memory of the tensors that are alive."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Bytes of the CPU storages that operators returned while this is on, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.highest = 0

    def now(self) -> int:
        """Bytes that are alive."""
        self._storages = {ref: n for ref, n in self._storages.items() if not ref.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and notes what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self.highest = max(self.highest, self.now())
        return result
