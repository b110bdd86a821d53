"""Record of one run, as reports, forecasts and the agent read it; and its memory estimate.

One record per (run, seed). Times are in milliseconds and leave out the untimed steps; bytes are
those that one rank sent, averaged over ranks and steps; shares are between 0 and 1.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shardlab.core.document import Document, validate
from shardlab.core.files import finite, read_json, read_json_lines, write_json_lines
from shardlab.results.contention import Contention

SCHEMA_VERSION = 3

Finite = Annotated[float | None, BeforeValidator(finite)]
"""None: not finite, as in a run that diverged; JSON has no such number"""

LinkEmulation = Literal["none", "namespaces", "in-process"]
"""none: the link is real; namespaces: the kernel delays packets; in-process: collectives end when
the formula issue + delay + bytes / rate says"""


class Setting(Document):
    """Configuration of a run and the machine that it ran on."""

    run: str
    seed: int
    engine: str
    world_size: int
    model: str
    parameters: int
    dataset: str
    sequence_length: int
    batch_size: int
    accumulation: int
    link: str
    """how the ranks were connected: loopback, or an emulated rate and delay"""
    link_emulation: LinkEmulation = "none"
    codec: str
    codec_config: dict[str, Any]
    weight_codec: str
    error_feedback: bool
    strategy: dict[str, Any]
    """the strategy in canonical form"""
    strategy_hash: str
    params_hash: str
    revision: str
    torch: str
    host: dict[str, Any]
    kernels: str
    """what computed codecs and updates: a compiled library with the hash of its sources, or the
    PyTorch reference and why"""
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
    bytes_peak: float | None = None
    """of the step with most of these: one that has an exchange; None in former records"""
    compression_ratio: float
    collective_ms: float | None
    """milliseconds per step with at least one collective running, waits for other ranks included;
    on a device by its own events. None in records of earlier versions, on devices"""
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
    """largest peak of a rank until the end of the steps: its resident set on a CPU, tensors on a
    GPU"""
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


class Breakdown(Document):
    """Breakdown of the profiled steps, means over steps and ranks."""

    profiled_step_ms: float
    compute_ms: float
    comm_ms_per_step: float
    comm_share: float
    comm_ms_by_op: dict[str, float]
    comm_ms_by_unit: dict[str, float]
    """by the unit whose values moved; `other` for none"""
    comm_skew_ms: Finite
    """time until the last rank has started the same collective; None where collectives of the ranks
    do not match, as of ranks that train alone"""
    comm_transfer_ms: Finite
    """the rest of the communication that could be matched across ranks"""
    exposed_comm_ms: float
    overlap: float
    """fraction of communication that is overlapped with compute"""
    copy_ms: float
    """copies to, from and on devices; on the CPU copies count as compute and this is 0"""
    exposed_copy_ms: float
    """copies not overlapped with compute or communication"""
    idle_ms: float
    """compute + exposed communication + exposed copies + idle = step"""
    forward_ms: float
    forward_compute_ms: float
    forward_comm_ms: float
    backward_ms: float
    backward_compute_ms: float
    backward_comm_ms: float
    backward_comm_share: float
    update_ms: float
    """the rest of the step"""
    update_compute_ms: float
    update_comm_ms: float


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


class Estimate(Document):
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


class Record(Setting, Training, Breakdown, Validation, Joined):
    """One line of `results.jsonl`."""

    schema_version: int = Field(SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)

    @property
    def divergence(self) -> str | None:
        """Words on a run without quality: at which step it diverged, or that it predicts nothing;
        None for others."""
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at}"
        if self.val_ppl is not None:
            return None
        return self.not_finite or "validation perplexity is not finite"


class Crash(Document):
    """A run whose ranks failed: a line of `results.jsonl`, and what its stages write."""

    run: str
    seed: int
    world_size: int
    link: str
    strategy: dict[str, Any]
    """in canonical form"""
    params_hash: str
    outcome: Literal["timeout", "crash", "memory"]
    crashed: str
    """one line: the error of the rank that is the cause, and the log"""


def is_crash(value: Any) -> bool:
    """Return whether a value read from a file stands for a run that crashed."""
    return isinstance(value, dict) and "crashed" in value


def read_crash(path: str | Path, fix: str) -> Crash | None:
    """Return the crash that a stage wrote in place of figures; None where it wrote figures.

    Args:
        fix: what the user should do when the file is missing or damaged.

    Raises:
        UserError: it is.
    """
    return Crash.from_file(path, fix) if is_crash(read_json(path, fix)) else None


def read_records(path: str | Path) -> list[Record | Crash]:
    """Read the records of a file of JSON lines.

    Raises:
        UserError: the file is missing or damaged, or a line is no record of this schema version.
    """
    lines = read_json_lines(path, "run python -m stages.collect")
    return [
        validate(Crash, line, f"{path}:{i}")
        if is_crash(line)
        else validate(Record, line, f"{path}:{i}")
        for i, line in enumerate(lines, 1)
    ]


def write_records(path: str | Path, records: Sequence[Record | Crash]) -> None:
    """Write JSON lines that `read_records` reads."""
    write_json_lines(path, [record.model_dump(mode="json") for record in records])


def table_row(record: Record) -> dict[str, Any]:
    """Return one flat row with the columns of every record; nested values become JSON text."""
    return {
        key: json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
        for key, value in record.model_dump(mode="json").items()
    }
