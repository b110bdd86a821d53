"""Devices that the tests of this folder run on: a CPU everywhere, and a GPU where there is one."""

import gc
import os
import time

import pytest
import torch

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", ON_GPU])
on_devices_long = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), ON_GPU]
)
"""for laws that tests of a CPU state in more detail elsewhere"""


def own_device(device: str) -> torch.device:
    """Return the device of a rank; ranks without a GPU of their own share the first."""
    alone = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    if device == "cuda" and alone:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


class Delay:
    """Milliseconds of work on the current stream of a GPU, or of sleep on a CPU."""

    def __init__(self, device: torch.device) -> None:
        # 0.1 ms to negate on an H100; what it holds does not matter, so streams may share it
        self._vector = torch.ones(1 << 26, device=device) if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._vector is None:
            time.sleep(1e-3)
            return
        for _ in range(20):
            self._vector.neg_()


def capped(gib: float) -> None:
    """Let this process allocate no more of its GPU."""
    gc.collect()  # what an error kept
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
