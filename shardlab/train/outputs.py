"""Outputs of a run: space for them, the whole model, and logs for TensorBoard."""

import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.tensorboard import SummaryWriter

from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import atomic, writing
from shardlab.engines.base import Engine
from shardlab.engines.state_files import in_host_memory
from shardlab.train.loop import StepEvent


def gather_trained(engine: Engine, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the whole model by name on rank 0; the others hold one unit of the engine at a time.

    Raises:
        UserError: the ranks hold different parameters.
    """
    whole: dict[str, Tensor] = {}
    checksums: dict[str, int] = {}
    for parts in engine.whole_parameters():
        checksums |= {name: checksum(tensor) for name, tensor in parts.items()}
        if dist.get_rank(group) == 0:
            whole |= in_host_memory(parts)
        del parts  # frees them before the next are allocated
    check_equal(checksums, "after training", group)
    return whole


class Telemetry:
    """Writer of the scalars of every step, into a folder that `tensorboard --logdir` shows.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: deque[StepEvent] = deque()
        """steps that a device has not done: their time in collectives is not yet known"""
        with writing(folder):
            # scalars of an earlier run of the same name would be drawn into the same curve
            shutil.rmtree(folder, ignore_errors=True)
            self._writer = SummaryWriter(str(folder))

    def write(self, event: StepEvent) -> None:
        """Add one step."""
        self._pending.append(event)
        while self._pending and self._pending[0].collective_ms is not None:
            self._write(self._pending.popleft())

    def close(self) -> None:
        """Write the last steps and close the file."""
        for event in self._pending:
            self._write(event)
        self._writer.close()

    def _write(self, event: StepEvent) -> None:
        scalars: dict[str, float | None] = {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            "train/gradient_norm": event.gradient_norm,
            "train/residual_norm": event.residual_norm,
            "train/clipped_steps": event.clipped_steps,
            "train/skipped_steps": event.skipped_steps,
            "validation/loss": event.val_loss,
            "speed/step_ms": event.step_ms,
            "speed/tokens_per_s": event.tokens / event.step_ms * 1e3,
            "speed/collective_ms": event.collective_ms,
            "memory/peak_bytes": event.memory_peak_bytes,
            "memory/reserved_bytes": event.memory_reserved_bytes,
        }
        with writing(self._folder):
            for name, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(name, value, event.step)


def write_traces(folder: Path, traces: Sequence[bytes]) -> None:
    """Write the compressed traces of all ranks where TensorBoard's profiler plugin finds them.

    The plugin (torch-tb-profiler) looks for this suffix; what precedes it is the worker's name.
    """
    for rank, content in enumerate(traces):
        with atomic(folder / f"rank{rank}.pt.trace.json.gz") as temporary:
            temporary.write_bytes(content)


def check_space(expected: Mapping[Path, int]) -> None:
    """Check that folders can be written, and that their file systems have space.

    Args:
        expected: bytes that each folder is about to receive, about; it is created.

    Raises:
        StorageError: a file cannot be written, or the free space does not suffice.
    """
    needed: Counter[int] = Counter()
    for folder in expected:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1))
        needed[folder.stat().st_dev] += expected[folder]
    for folder in expected:
        size, free = needed[folder.stat().st_dev], shutil.disk_usage(folder).free
        if size > free:
            raise StorageError(
                f"{folder}: the run is to write about {size / 1e9:.3g} GB to this disk, where "
                f"{free / 1e9:.3g} GB are free: free space, or lower train.checkpoint.keep"
            )


REPLICA_CHECK_EVERY = 100
"""steps; checksums read the parameters once, which a step does many times"""


_INTEGERS = {4: torch.int32, 8: torch.int64}


def check_replicas(engine: Engine, step: int, group: dist.ProcessGroup) -> None:
    """Compare what every rank holds, wherever another rank should hold the same.

    Raises:
        UserError: on all ranks: names the ranks that differ.
    """
    checksums: dict[str, int] = {}
    for name, tensor in engine.replicas().items():
        checksums[f"{name} {_shard(tensor)}"] = checksum(
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
        )
    check_equal(checksums, f"after {step} steps", group)


def _shard(tensor: Tensor) -> list[int]:
    """Return which part of the whole tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return []
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    sharded = (isinstance(placement, Shard) for placement in tensor.placements)
    return [index for index, is_sharded in zip(coordinate, sharded, strict=True) if is_sharded]


def checksum(tensor: Tensor) -> int:
    """Return the sum of the bits of all elements as integers, which wraps around."""
    bits = tensor.detach().reshape(-1)
    integers = _INTEGERS.get(bits.element_size())
    if integers is None:
        return int(bits.view(torch.uint8).sum())
    return int(bits.view(integers).sum(dtype=integers))


def check_equal(checksums: Mapping[str, int], when: str, group: dist.ProcessGroup) -> None:
    """Compare the checksums of each name over the ranks that have it.

    Raises:
        UserError: on all ranks: names the ranks that differ from most of them.
    """
    ranks = gather_values(dict(checksums), group)
    for name in dict.fromkeys(name for values in ranks for name in values):
        by_rank = {rank: values[name] for rank, values in enumerate(ranks) if name in values}
        (usual, _), *others = Counter(by_rank.values()).most_common()
        if others:
            odd = [str(rank) for rank, value in by_rank.items() if value != usual]
            raise UserError(
                f"{when} rank {', '.join(odd)} holds other values of {name.partition(' ')[0]} than "
                f"rank {next(rank for rank, value in by_rank.items() if value == usual)}: train "
                "again; if it repeats, try the strategy without its codec, and test the memory"
            )
