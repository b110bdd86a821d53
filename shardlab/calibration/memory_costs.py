"""Costs of copies, optimizer updates and disk access, while all ranks do the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab.activations.anonymous_file import AnonymousFile, aligned_blocks
from shardlab.activations.checkpoint import scratch_folder
from shardlab.calibration.codec_costs import interleave
from shardlab.kernels.adam import Hyper, adam_
from shardlab.kernels.workers import Workers
from shardlab.measurements.calibration import UPDATE_BYTES, MemoryOperation

ELEMENTS = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
"""of a vector of float32"""


def memory_times(
    operations: Sequence[MemoryOperation], repetitions: int, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the costs on this rank while the others do the same."""
    found = []
    for n in ELEMENTS:
        every = {**_in_memory(n), **(_on_disk(n) if "load" in operations else {})}
        times = interleave({name: every[name] for name in operations}, repetitions, group)
        sizes = {"update": UPDATE_BYTES * n}
        found += [
            {"operation": name, "nbytes": sizes.get(name, 4 * n), "seconds": seconds}
            for name, seconds in times.items()
        ]
    return found


def _in_memory(n: int) -> Mapping[str, Callable[[], object]]:
    source, target = torch.ones(n), torch.ones(n)
    vectors, hyper = torch.zeros(4, n), Hyper(1e-3)
    threads = torch.get_num_threads()
    workers = Workers(threads) if threads > 1 else None
    parameter, exp_avg, exp_avg_sq, gradient = vectors
    return {
        "copy": lambda: target.copy_(source),
        "update": lambda: adam_(
            parameter, exp_avg, exp_avg_sq, [gradient], hyper, 1, workers=workers
        ),
    }


def _on_disk(n: int) -> Mapping[str, Callable[[], object]]:
    file = AnonymousFile.create(scratch_folder())
    buffer = aligned_blocks(4 * n, torch.device("cpu"))
    file.reserve(0, buffer.numel())
    return {"load": lambda: file.read(0, buffer), "store": lambda: file.write(0, buffer)}
