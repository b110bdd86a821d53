"""Result of one training run, as reports, predictions and searches read it; its memory estimate.

One result per (run, seed). Times are in milliseconds and leave out the untimed steps; bytes are
those that one rank sent, averaged over ranks and steps; shares are between 0 and 1.
"""

import json
from typing import Any, Literal

from shardlab.core.document import Document
from shardlab.results.contention import Contention
from shardlab.results.result import Breakdown, Failure, Finite, LinkEmulation, Result


class Setting(Result):
    """Header of a training run, and what else it was configured to."""

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
    """whether torch used deterministic algorithms alone"""
    tf32: bool = False
    """whether products of float32 might round their factors to TF32"""
    placement: list[str] = []
    """one line per rank: its CPUs"""


class Training(Document):
    """Measurements of the training loop."""

    steps: int
    """steps that ran"""
    diverged_at: int | None
    """first of the last steps whose gradient or loss was not finite, counted from 0: the run was
    stopped there; None: it was not"""
    contention: Contention | None
    """CPU time that others used during the steps; None where the kernel does not count it"""
    paused_steps: int = 0
    """timed steps in which the machine paused (`shardlab.results.interval.pauses`); no time below
    has them"""
    step_ms_mean: float
    step_ms_p50: float
    step_ms_p90: float
    step_ms_p95: float
    tokens_per_s: float
    """over all ranks"""
    train_loss: Finite
    """nats per token, mean of the last tenth of the steps"""
    bytes_raw: float
    """bytes per step that the engine asked to move"""
    bytes_wire: float
    """bytes per step that were sent, metadata included; with rare exchanges over all steps and the
    exchange after the last one, else without untimed steps"""
    bytes_peak: float
    """of the step with most of these: one that has an exchange"""
    compression_ratio: float
    collective_ms: float | None
    """milliseconds per step with at least one collective running, waits for other ranks included;
    on a device by its own events; None where no step has it"""
    effective_bandwidth_raw: float | None
    """bytes_raw over collective_ms, bytes per second; None where nothing was sent"""
    effective_bandwidth_wire: float | None
    """bytes_wire over collective_ms, bytes per second"""
    interface_bytes: float | None = None
    """bytes per step that a node sent over its link by the network interface, with the headers of
    Ethernet, IP, TCP and gloo, mean over nodes; only emulated links in namespaces give every node
    a separate interface"""
    interface_bytes_inside: float | None = None
    """likewise over loopback, between the ranks of the node"""
    ledger: dict[str, Any]
    """by kind of message, per rank and step: collectives, bytes, encode and decode time, and the
    messages that were sent uncompressed by their reason"""
    encode_ms: float
    decode_ms: float
    index_bytes: float
    metadata_bytes: float
    density: float | None
    """fraction of the elements that was sent, for sparse codecs"""
    extra_collectives: float
    """collectives that an uncompressed run would not need"""
    extra_collective_ms: float
    """time in them, waits for other ranks included"""
    residual_norm: Finite
    grad_rel_error: Finite
    """|compressed mean gradient - exact mean gradient| / |exact|, on the audited steps"""
    grad_cosine: Finite
    memory_peak_bytes: int
    """largest peak of a rank until the end of the steps, or until the first evaluation of
    `train.validation`: its resident set on a CPU, tensors on a GPU"""
    memory_growth_bytes: int
    """of the largest rank: peak device memory minus that before the model was built; on a CPU
    resident set without mapped files, on a GPU memory of tensors"""
    memory_reserved_bytes: int | None
    """peak memory reserved by torch on a GPU; None on a CPU"""
    flops_per_token: float
    """of the model, forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B)"""
    product_flops_per_s: float
    """of a rank's fastest square matrix product in the compute dtype, all ranks at once"""
    flops_share: float
    """flops_per_token * tokens_per_s over product_flops_per_s of all ranks"""
    clipped_steps: int
    skipped_steps: int
    """steps skipped because a gradient was not finite"""
    invalid_steps: int
    """skipped steps that the search for the fp16 loss scale does not explain: there is no scale, or
    the loss was not finite either"""


class Validation(Document):
    """Quality of the saved model on the validation split."""

    val_loss: Finite
    """nats per token"""
    val_ppl: Finite
    """exp(val_loss)"""
    val_bits_per_byte: Finite
    """null where the tokenizer lost some of the text, or nobody knows its bytes"""
    val_tokens: int
    untrained_ppl: Finite
    """perplexity of the same model before its first step: untrained, or as it was pretrained"""
    not_finite: str | None = None
    """why another figure is null"""


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
    """peak of a step per rank in closed form (`shardlab.models.memory`)"""
    scaling_efficiency: float | None = None
    """tokens per second and rank relative to one rank; None where that was not timed"""


class Metrics(Setting, Training):
    """Content of metrics.json of the train stage."""


class TrainResult(Metrics, Breakdown, Validation, Joined):
    """Result of a training run, with its traced steps and the quality of its model."""

    @property
    def divergence(self) -> str | None:
        """Words on a run without quality: at which step it diverged, or that it predicts nothing;
        None for others."""
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at}"
        if self.val_ppl is not None:
            return None
        return self.not_finite or "validation perplexity is not finite"

    def failure(self) -> Failure:
        """Return the failure that a run without quality is.

        Raises:
            ValueError: it has quality.
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
    """Return one flat row, of equal columns for all results; nested values become JSON text."""
    return {
        key: json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
        for key, value in result.model_dump(mode="json").items()
    }
