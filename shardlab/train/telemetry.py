"""TensorBoard logs of a run: scalars of every step, and the traces of all ranks."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from shardlab.core.files import atomic
from shardlab.environment.host import resident_memory
from shardlab.loop.loop import StepEvent


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
