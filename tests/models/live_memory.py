"""Measurement of the memory of live tensors."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Mode that counts the live bytes of the CPU storages that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.highest = 0

    def now(self) -> int:
        """Return the live bytes."""
        self._storages = {ref: n for ref, n in self._storages.items() if not ref.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and record the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self.highest = max(self.highest, self.now())
        return result
