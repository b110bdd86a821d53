"""Result of one training run, as reports, predictions and searches read it, and memory estimate.

One result per (run, seed). Times are in milliseconds and leave out the untimed steps; bytes are
those that one rank sent, averaged over ranks and steps; shares are between 0 and 1.
"""

import json
from typing import Any, Literal

from shardlab.core.document import Document
from shardlab.results.contention import Contention
from shardlab.results.result import Breakdown, Failure, Finite, LinkEmulation, Result


class Setting(Result):
    """Header of a training run, and its further settings."""

    kind: Literal["train", "trial"] = "train"
    strategy: dict[str, Any]
    strategy_hash: str
    parameters: int
    link_emulation: LinkEmulation
    engine: str
    dataset: str
    codec: str
    codec_config: dict[str, Any]
    weight_codec: str
    error_feedback: bool
    params_hash: str
    deterministic: bool = False
    """Whether torch used deterministic algorithms only."""
    tf32: bool = False
    """Whether products of float32 might round their factors to TF32."""
    placement: list[str] = []
    """CPUs of the ranks, one line per rank."""


class Training(Document):
    """Measurements of the training loop."""

    steps: int
    """Number of steps that ran."""
    diverged_at: int | None
    """First step, counted from 0, of the last sequence of steps with a gradient or loss that was
    not finite, after which the run was stopped; None: it was not stopped."""
    contention: Contention | None
    """CPU time that other processes used during the steps; None where the kernel does not count it.
    """
    paused_steps: int = 0
    """Number of timed steps in which the machine paused (`shardlab.results.interval.pauses`); the
    times below leave them out."""
    step_ms_mean: float
    step_ms_p50: float
    step_ms_p90: float
    step_ms_p95: float
    tokens_per_s: float
    """Tokens per second of all ranks."""
    train_loss: Finite
    """Nats per token, mean of the last tenth of the steps."""
    bytes_raw: float
    """Bytes per step that the engine asked to move."""
    bytes_wire: float
    """Bytes per step that were sent, metadata included. With `sync` the mean is over all steps and
    includes the synchronisation after the last one; otherwise it leaves out untimed steps."""
    bytes_peak: float
    """Bytes of the step that sends most: with `sync`, one that synchronises."""
    compression_ratio: float
    collective_ms: float | None
    """Milliseconds per step with at least one collective running, waits for other ranks included;
    on a device by device events; None where no step measured it."""
    effective_bandwidth_raw: float | None
    """bytes_raw over collective_ms, bytes per second; None where nothing was sent."""
    effective_bandwidth_wire: float | None
    """bytes_wire over collective_ms, bytes per second."""
    interface_bytes: float | None = None
    """Bytes per step that a node sent over its link, counted by the network interface, with headers
    of Ethernet, IP, TCP and gloo, mean over nodes; only emulated links in namespaces give every
    node a separate interface."""
    interface_bytes_inside: float | None = None
    """Bytes per step over loopback, between the ranks of a node, counted in the same way."""
    ledger: dict[str, Any]
    """Collectives, bytes, encode and decode time, and messages that were sent uncompressed with
    their reason; by kind of message, per rank and step."""
    encode_ms: float
    decode_ms: float
    index_bytes: float
    metadata_bytes: float
    density: float | None
    """Fraction of the elements that was sent, for sparse codecs."""
    extra_collectives: float
    """Number of collectives that an uncompressed run would not need."""
    extra_collective_ms: float
    """Time in extra collectives, waits for other ranks included."""
    residual_norm: Finite
    grad_rel_error: Finite
    """|compressed mean gradient - exact mean gradient| / |exact|, on the audited steps."""
    grad_cosine: Finite
    memory_peak_bytes: int
    """Largest peak of a rank until the end of the steps, or until the first evaluation of
    `train.validation`: resident set on a CPU, tensors on a GPU."""
    memory_growth_bytes: int
    """Peak device memory of the largest rank minus its memory before the model was built; on a CPU
    the resident set without mapped files, on a GPU the memory of tensors."""
    memory_reserved_bytes: int | None
    """Peak memory reserved by torch on a GPU; None on a CPU."""
    flops_per_token: float
    """FLOPs of forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B)."""
    product_flops_per_s: float
    """FLOP/s of a rank's fastest square matrix product in the compute dtype, all ranks at once."""
    flops_share: float
    """flops_per_token * tokens_per_s over product_flops_per_s of all ranks."""
    clipped_steps: int
    skipped_steps: int
    """Number of steps skipped because a gradient was not finite."""
    invalid_steps: int
    """Number of skipped steps that the search for the fp16 loss scale does not explain: there is no
    scale, or the loss was not finite either."""


class Validation(Document):
    """Quality of the saved model on the validation split."""

    val_loss: Finite
    """Nats per token."""
    val_ppl: Finite
    """exp(val_loss)."""
    val_bits_per_byte: Finite
    """Bits per byte; null where the tokenizer lost some of the text, or its bytes are unknown."""
    val_tokens: int
    untrained_ppl: Finite
    """Perplexity of the model before its first step: untrained, or as it was pretrained."""
    not_finite: str | None = None
    """Why a figure is null."""


class MemoryEstimate(Document):
    """Estimated peak memory of a rank in a training step, in closed form."""

    bytes_by_category: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes_by_category.values())


class Joined(Document):
    """Fields that other stages add; absent from the record of a trial."""

    memory_estimate_bytes: int | None = None
    """Peak of a rank in a step, in closed form (`shardlab.models.memory`)."""
    scaling_efficiency: float | None = None
    """Tokens per second and rank, over one rank's; None where one rank was not timed."""


class Metrics(Setting, Training):
    """Content of metrics.json of the train stage."""


class TrainResult(Metrics, Breakdown, Validation, Joined):
    """Result of a training run, with its traced steps and the quality of its model."""

    @property
    def divergence(self) -> str | None:
        """Reason why a run has no quality: the step at which it diverged, or a perplexity that is
        not finite; None for other runs."""
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at}"
        if self.val_ppl is not None:
            return None
        return self.not_finite or "validation perplexity is not finite"

    def failure(self) -> Failure:
        """Return the failure of a run without quality.

        Raises:
            ValueError: the run has a quality.
        """
        if self.divergence is None:
            raise ValueError(f"{self.run}: it has quality")
        return Failure(
            **self.header(),
            outcome="diverged",
            detail=self.divergence,
            params_hash=self.params_hash,
        )


def table_row(result: TrainResult) -> dict[str, Any]:
    """Return one flat row with the same columns for all results; nested values become JSON text."""
    return {
        key: json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
        for key, value in result.model_dump(mode="json").items()
    }
