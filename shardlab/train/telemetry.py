"""What can be watched while a run goes on: TensorBoard scalars from rank 0."""

import shutil
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Telemetry:
    """Writes the scalars of every step into a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, tokens_per_step: int) -> None:
        # scalars of an earlier run of the same name would be drawn into the same curve
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        self._tokens_per_step = tokens_per_step

    def write(
        self, step: int, loss: float, step_ms: float, learning_rate: float, gradient_norm: float
    ) -> None:
        """Adds one step: loss of this rank in nats, duration in ms, both rates and the norm."""
        scalars = {
            "train/loss": loss,
            "train/learning_rate": learning_rate,
            "train/gradient_norm": gradient_norm,
            "speed/step_ms": step_ms,
            "speed/tokens_per_s": self._tokens_per_step / step_ms * 1e3,
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is still in memory."""
        self._writer.close()
