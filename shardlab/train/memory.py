"""How much memory a run takes beyond that of the process it runs in."""

from dataclasses import dataclass

import torch

from shardlab.environment.host import resident_memory


@dataclass(frozen=True)
class MemoryUse:
    """Of one rank, in bytes."""

    memory_peak_bytes: int
    """largest resident set"""
    memory_growth_bytes: int
    """what the device that computes held at most more than at the beginning"""
    memory_reserved_bytes: int | None
    """most that torch reserved on the device; None on a CPU"""


class MemoryMeter:
    """Measures from where it is made, which is before there is a model.

    On a CPU growth is that of the resident set without files: the code of libraries is mapped when
    it is used first, which is no memory of the run. On a GPU it is that of tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = resident_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated = torch.cuda.memory_allocated(device)

    def used(self) -> MemoryUse:
        """So far."""
        now, before = resident_memory(), self._before
        if self._device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self._device) - self._allocated
            return MemoryUse(now.highest, grown, torch.cuda.max_memory_reserved(self._device))
        mapped = now.of_files - before.of_files
        return MemoryUse(now.highest, max(0, now.highest - before.now - mapped), None)
