"""What can be watched while a run goes on: TensorBoard scalars from rank 0."""

import shutil
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from shardlab.train.loop import StepEvent


class Telemetry:
    """Writes the scalars of every step into a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        # scalars of an earlier run of the same name would be drawn into the same curve
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))

    def write(self, event: StepEvent) -> None:
        """Adds one step."""
        scalars = {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            "train/gradient_norm": event.gradient_norm,
            "speed/step_ms": event.step_ms,
            "speed/tokens_per_s": event.tokens / event.step_ms * 1e3,
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Writes out what is still in memory."""
        self._writer.close()
