"""Outputs of a run: the whole model, compared between ranks, and TensorBoard logs."""

import math
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from shardlab.checkpoint.state_files import in_host_memory
from shardlab.core.files import atomic
from shardlab.engines.common.base import Engine
from shardlab.environment.host import resident_memory
from shardlab.loop.loop import StepEvent

_PIECE = 2**20
"""elements"""


def gather_trained(engine: Engine, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the whole model by name on rank 0; the others hold one unit of the engine at a time.

    Raises:
        RuntimeError: the ranks hold different parameters.
    """
    whole: dict[str, Tensor] = {}
    checksums: dict[str, int] = {}
    for parts in engine.whole_parameters():
        checksums |= {name: _checksum(tensor) for name, tensor in parts.items()}
        if dist.get_rank(group) == 0:
            whole |= in_host_memory(parts)
        del parts  # frees them before the next are allocated
    _check_equal(checksums, group)
    return whole


def _checksum(tensor: Tensor) -> int:
    checksum = 0
    for piece in tensor.reshape(-1).split(_PIECE):
        # a copy: the engine cannot free storage that numpy refers to
        copied = piece.to("cpu", copy=True).view(torch.uint8)
        checksum = zlib.crc32(copied.numpy(), checksum)
    return checksum


def _check_equal(checksums: dict[str, int], group: dist.ProcessGroup) -> None:
    """Compare checksums between ranks: no loss curve shows replicas that have diverged."""
    highest = torch.tensor([*checksums.values()])
    lowest = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    names = [n for n, same in zip(checksums, highest == lowest, strict=True) if not same]
    if names:
        raise RuntimeError(f"ranks hold different parameters after training: {names[:3]}")


class Telemetry:
    """Writer of the scalars of every step, into a folder that `tensorboard --logdir` shows.

    Args:
        clip: gradient norm from which a step counts as clipped.
    """

    def __init__(self, folder: Path, clip: float | None) -> None:
        # scalars of an earlier run of the same name would be drawn into the same curve
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        self._clip = math.inf if clip is None else clip
        self._clipped = self._skipped = 0

    def write(self, event: StepEvent) -> None:
        """Add one step."""
        self._clipped += event.gradient_norm > self._clip
        self._skipped += not event.applied
        scalars = {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            "train/gradient_norm": event.gradient_norm,
            "speed/step_ms": event.step_ms,
            "train/clipped_steps": self._clipped,
            "train/invalid_steps": self._skipped,
            "speed/tokens_per_s": event.tokens / event.step_ms * 1e3,
            "speed/collective_ms": event.collective_ms,
            "memory/peak_bytes": resident_memory().highest,
        }
        for name, value in scalars.items():
            if value is None:
                continue
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Flush to disk."""
        self._writer.close()


def write_traces(folder: Path, traces: Sequence[bytes]) -> None:
    """Write the compressed traces of all ranks where TensorBoard's profiler plugin finds them.

    The plugin (torch-tb-profiler) looks for this suffix; what precedes it is the worker's name.
    """
    for rank, content in enumerate(traces):
        with atomic(folder / f"rank{rank}.pt.trace.json.gz") as temporary:
            temporary.write_bytes(content)
