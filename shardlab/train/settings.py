"""Parameters of training runs."""

from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from shardlab.core.cpu_affinity import CpuAffinity
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.core.types import (
    BatchSize,
    Betas,
    Count,
    OptimizerName,
    Seconds,
    SequenceLength,
    WorldSize,
)
from shardlab.models.settings import StepSize


class Checkpoint(Document):
    """Checkpoints of a run, from which it resumes after it was killed."""

    every: int = Field(ge=1)
    """steps between checkpoints"""
    keep: int = Field(2, ge=1)
    """number of checkpoints to keep, the most recent ones; without `folder` none once the run has
    succeeded"""
    format: Literal["full", "sharded"] = "full"
    """full: whole tensors, written by rank 0, for every engine and number of ranks; sharded: every
    rank writes its part, for other numbers of ranks and meshes of the same units"""
    asynchronous: bool = False
    """sharded: training continues while the files are written"""
    elastic: bool = False
    """resume also with other `train` and `strategies` values, as far as the format allows: no
    longer bit for bit, and the metrics cover both parts; model, seed and data must be the same"""
    folder: str | None = Field(None, min_length=1)
    """folder where checkpoints stay, also once a run has succeeded, as RUN/seedS/step-00000050, to
    begin from by `--resume`; null: they are in .work, and are removed at the end"""

    @model_validator(mode="after")
    def _full_takes_all_ranks(self) -> Self:
        if self.asynchronous and self.format == "full":
            raise ValueError("asynchronous is for format: sharded: change one of them")
        return self


class ValidationCurve(Document):
    """Validation losses during a run. They change nothing of the training, and their time is in no
    step."""

    every: int = Field(ge=1)
    """steps between evaluations"""
    sequences: int | None = Field(None, ge=1)
    """first sequences of the validation split, which are evaluated; null: all of it, as for the
    loss of the trained model"""


_WITHOUT_RESULTS = {"checkpoint", "timeout_s"}
"""parameters of `Train` that no result depends on"""
_ADDED = ("betas", "deterministic", "global_batch_size", "optimizer", "validation")
"""parameters of `Train` that earlier runs lacked, which had what is now the default"""


class Train(Document):
    """Training run of every strategy."""

    world_size: WorldSize = 2
    """number of ranks"""
    threads: int = Field(1, ge=1, le=4096)
    """CPU threads per rank; part of the result, because sums depend on it"""
    placement: CpuAffinity = "auto"
    """CPU affinity of the ranks. auto: with several NUMA nodes each
    rank gets CPUs of its own on the node of its GPU, or on the nodes round-robin; otherwise nothing
    changes. cores: CPUs of its own on every machine. none: nothing changes. Or the CPUs of each
    rank of a machine, such as ['0-3,8', '4-7']"""
    steps: int = Field(120, ge=2, le=10**9)
    """updates of the parameters"""
    batch_size: BatchSize | None = 8
    """sequences per rank and micro-batch; null: as `global_batch_size` says"""
    global_batch_size: Count | None = None
    """sequences per step of all ranks, in place of `batch_size`: a multiple of ranks times
    micro-batches, in timings on other numbers of ranks, too; null: as `batch_size` says"""
    accumulation: int = Field(1, ge=1, le=2**20)
    """micro-batches per step"""
    sequence_length: SequenceLength = 64
    """tokens that are predicted per sequence"""
    optimizer: OptimizerName = "adamw"
    """adamw; muon: torch.optim.Muon for the matrices of the blocks, whose updates are as large as
    those of AdamW, and AdamW for embeddings, head, normalisations and biases; engine ddp alone"""
    learning_rate: float = Field(3e-3, gt=0)
    """after the warm-up"""
    warmup_steps: int = Field(10, ge=0)
    """steps of linear learning-rate warm-up"""
    decay: Literal["cosine", "constant"] = "cosine"
    """learning rate after warm-up: cosine decay to a tenth, or constant"""
    weight_decay: float = Field(0.1, ge=0)
    """decoupled from the gradient"""
    betas: Betas = (0.9, 0.95)
    """of AdamW: decay of the first and of the second moment, as language models are commonly
    trained (Brown et al. 2020, appendix B)"""
    clip: float | None = Field(1.0, gt=0)
    """maximum global gradient norm, or null"""
    untimed_steps: int = Field(5, ge=0)
    """first steps, left out of all timings"""
    deterministic: bool = False
    """use only algorithms that repeat their bits: for GPUs, where they are slower. On CPUs runs
    repeat their bits in any case"""
    audit_steps: int = Field(1, ge=0, le=10**6)
    """extra steps after the run whose gradients are also summed uncompressed, to measure the error
    of the codec"""
    profiled_steps: int = Field(3, ge=1, le=10_000)
    """extra steps after the run that are traced"""
    timeout_s: Seconds = 60
    """maximum wait for another rank, seconds"""
    link: Link | None = None
    """emulated link between ranks of this machine; null: none"""
    checkpoint: Checkpoint | None = None
    """checkpoints to resume from after an interruption; null: start over"""
    validation: ValidationCurve | None = None
    """validation loss every few steps; null: of the trained model alone"""

    @model_validator(mode="before")
    @classmethod
    def _leave_default_batch(cls, value: Any) -> Any:
        """Leave the default of `batch_size` out where `global_batch_size` is named alone."""
        if isinstance(value, dict) and value.get("global_batch_size") is not None:
            return {"batch_size": None, **value}
        return value

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise ValueError(
                "name one of batch_size (of a rank and micro-batch) and global_batch_size (of a "
                "step of all ranks): set the other to null, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _steps_remain(self) -> Self:
        if self.untimed_steps >= self.steps:
            raise ValueError(f"untimed_steps must be below steps ({self.steps})")
        saved = self.checkpoint
        if saved is not None and saved.folder is not None and saved.every > self.steps:
            raise ValueError(
                f"checkpoint.every must be at most steps ({self.steps}), or nothing is kept in "
                f"{saved.folder}"
            )
        return self

    def step_size(self, world_size: int, accumulation: int | None = None) -> StepSize:
        """Return the size of a step on each of so many ranks.

        Args:
            accumulation: micro-batches per step; None: as many as here.

        Raises:
            UserError: ranks times micro-batches do not divide `global_batch_size`.
        """
        count, total = accumulation or self.accumulation, self.global_batch_size
        if total is None:
            size = cast(int, self.batch_size)
        else:
            parts = world_size * count
            size, left = divmod(total, parts)
            if left:
                values = [str(parts * number) for number in (size, size + 1) if number]
                raise UserError(
                    f"train.global_batch_size: {total} sequences are not divided by {world_size} "
                    f"ranks x {count} micro-batches: take {' or '.join(values)}"
                )
        return StepSize(size, self.sequence_length, count, self.clip, self.optimizer)

    def meaning(self) -> dict[str, Any]:
        """Return the parameters that the results depend on, as plain data; those of `_ADDED` are
        left out at their defaults, as in runs from before them."""
        defaults = {key: type(self).model_fields[key].default for key in _ADDED}
        same = {key for key, default in defaults.items() if getattr(self, key) == default}
        return self.model_dump(mode="json", exclude=_WITHOUT_RESULTS | same)
