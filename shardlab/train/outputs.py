"""Outputs of a run: space for them, the whole model, compared between ranks, TensorBoard logs."""

import math
import os
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor

from shardlab.core.errors import StorageError
from shardlab.core.files import atomic, writing
from shardlab.core.progress import say
from shardlab.engines.base import Engine
from shardlab.engines.state_files import in_host_memory
from shardlab.train.loop import StepEvent
from shardlab.train.replicas import check_equal, checksum
from shardlab.train.utilization import peak_memory


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

    A log: where it cannot be written, training goes on without it and says so.

    Args:
        clip: gradient norm from which a step counts as clipped.
        device: that computes.
    """

    def __init__(self, folder: Path, clip: float | None, device: torch.device) -> None:
        # scalars of an earlier run of the same name would be drawn into the same curve
        shutil.rmtree(folder, ignore_errors=True)
        self._clip = math.inf if clip is None else clip
        self._clipped = self._skipped = 0
        self._device = device
        self._waiting: deque[StepEvent] = deque()
        """steps that a device has not done: their time in collectives is written later"""
        self._path = folder / f"events.out.tfevents.{time.time_ns()}"
        # not torch's SummaryWriter, whose thread ends with a traceback when the disk is full
        self._file: FileIO | None = None
        with self._best_effort():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "w")
            self._record(Event(wall_time=time.time(), file_version="brain.Event:2"))

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
            "memory/peak_bytes": peak_memory(self._device),
        }
        self._scalars(event.step, scalars)
        self._waiting.append(event)
        self._write_known()

    def close(self) -> None:
        """Close the file."""
        self._write_known()
        if self._file is not None:
            self._file.close()

    def _write_known(self) -> None:
        while self._waiting and (found := self._waiting[0].collective_ms) is not None:
            self._scalars(self._waiting.popleft().step, {"speed/collective_ms": found})

    def _scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        with self._best_effort():
            self._record(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _record(self, event: Event) -> None:
        if self._file is not None:
            RecordWriter(self._file).write(event.SerializeToString())

    @contextmanager
    def _best_effort(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            say(f"{self._path.parent}: no scalars for TensorBoard from here on: {error}")
            self._file = None


def write_traces(folder: Path, traces: Sequence[bytes]) -> None:
    """Write the compressed traces of all ranks where TensorBoard's profiler plugin finds them.

    The plugin (torch-tb-profiler) looks for this suffix; what precedes it is the worker's name.
    They are copies: where they cannot be written, the run says so and succeeds.
    """
    try:
        for rank, content in enumerate(traces):
            with atomic(folder / f"rank{rank}.pt.trace.json.gz") as temporary:
                temporary.write_bytes(content)
    except StorageError as error:
        say(str(error))


def probe(expected: Mapping[Path, int]) -> None:
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
                os.fsync(file.fileno())
        needed[folder.stat().st_dev] += expected[folder]
    for folder in expected:
        size, free = needed[folder.stat().st_dev], shutil.disk_usage(folder).free
        if size > free:
            raise StorageError(
                f"{folder}: the run is to write about {size / 1e9:.3g} GB to "
                f"{_mount_of(folder)}, where {free / 1e9:.3g} GB are free: free space, or lower "
                "train.checkpoint.keep"
            )


def _mount_of(folder: Path) -> str:
    """Return the file system of a folder as `/scratch (ext4)`."""
    place = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(mount, kind) for mount, kind in mounts if place.is_relative_to(mount)]
    mount, kind = max(above, key=lambda each: len(each[0]))
    return f"{mount} ({kind})"
