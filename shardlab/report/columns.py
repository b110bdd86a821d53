"""Every column of every table in one place: its title, unit, how it is written, what it means."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardlab.report.numbers import (
    ABSENT,
    figure,
    fixed,
    optional,
    plus_minus,
    scientific,
    within,
)

Row = dict[str, Any]
"""a row of `aggregate.comparison`, with `run` and `is_baseline`"""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    unit: str
    cell: Callable[[Row], str]
    meaning: str
    numeric: bool = True

    @property
    def heading(self) -> str:
        """Title and unit in one line."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _plain(name: str, digits: int = 3, scale: float = 1) -> Callable[[Row], str]:
    return lambda row: figure(row[name] * scale, digits)


def _optional(name: str, digits: int = 3, scale: float = 1) -> Callable[[Row], str]:
    return lambda row: optional(row[name] * scale, digits)


def _spread(name: str, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: plus_minus(row[name], row[f"{name}_sd"], digits)


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: fixed(100 * row[name], 1)


def _step_ratio(row: Row) -> str:
    if row["is_baseline"]:
        return "1 (baseline)"
    return within(row["step_ratio"], row["step_ratio_low"], row["step_ratio_high"], 3)


def _ppl_change(row: Row) -> str:
    if row["is_baseline"]:
        return "baseline"
    change, low, high = (100 * (row[f"ppl_ratio{end}"] - 1) for end in ("", "_low", "_high"))
    return within(change, low, high, 2)


def _gradient_error(row: Row) -> str:
    error = row["grad_rel_error"]
    return scientific(error) if 0 < error < 1e-3 else optional(error)


def _by_operation(row: Row) -> str:
    times = json.loads(row["comm_ms_by_op"])
    return ", ".join(f"{name} {figure(ms)}" for name, ms in times.items()) or ABSENT


_MB = 1e-6

RUN = Column("run", "", lambda row: row["run"], "name of the strategy in params.yaml", False)
STEP = Column(
    "step",
    "ms",
    _spread("step_ms_mean"),
    "wall time of a training step; mean ± standard deviation over seeds of the mean over the timed "
    "steps",
)
STEP_RATIO = Column(
    "step / baseline",
    "",
    _step_ratio,
    "step time over that of the baseline run: geometric mean of the ratios seed by seed, with its "
    "95 % interval (Student's t on the logarithms)",
)
WIRE = Column(
    "wire",
    "MB/step",
    _plain("bytes_wire", scale=_MB),
    "bytes that one rank really sent per step, indices, scales and headers included "
    "(1 MB = 10⁶ bytes)",
)
RATIO = Column(
    "ratio",
    "",
    _plain("compression_ratio"),
    "compression ratio: raw bytes, what the best algorithm would send as float32, over wire bytes; "
    "below 1 for gloo's own reduce-scatter, which sends everything twice",
)
PPL = Column(
    "val. perplexity",
    "",
    _spread("val_ppl", 4),
    "perplexity of the saved model on the validation split, mean ± standard deviation over seeds",
)
PPL_CHANGE = Column(
    "perplexity change",
    "%",
    _ppl_change,
    "validation perplexity against the baseline: geometric mean of the ratios seed by seed minus "
    "one, with its 95 % interval; an interval that holds 0 is no evidence of a difference",
)
BITS = Column(
    "bits per byte",
    "",
    _spread("val_bits_per_byte", 4),
    "validation loss in bits per byte of text; comparable between tokenizers",
)

HEADLINE = [RUN, STEP, STEP_RATIO, WIRE, RATIO, PPL, PPL_CHANGE, BITS]

COMPARISON = [
    RUN,
    Column("strategy", "", lambda row: row["strategy"], "the strategy in words", False),
    Column(
        "engine", "", lambda row: row["engine"], "what shards and synchronizes the model", False
    ),
    Column("codec", "", lambda row: row["codec"], "how gradients are encoded for the wire", False),
    Column("seeds", "", lambda row: str(row["seeds"]), "runs that the figures are taken over"),
    STEP,
    STEP_RATIO,
    Column("throughput", "tokens/s", _spread("tokens_per_s", 3), "training tokens over all ranks"),
    Column(
        "raw",
        "MB/step",
        _plain("bytes_raw", scale=_MB),
        "bytes that one rank would have sent per step without a codec",
    ),
    WIRE,
    RATIO,
    Column(
        "communication",
        "% of step",
        _share("comm_share"),
        "share of the profiled steps in which a collective ran (union of their intervals)",
    ),
    Column(
        "exposed",
        "ms",
        _plain("exposed_comm_ms"),
        "communication that no compute hid, per profiled step",
    ),
    Column(
        "overlap",
        "% of comm.",
        _share("overlap"),
        "part of the communication that ran while compute ran",
    ),
    PPL,
    PPL_CHANGE,
    BITS,
    Column(
        "gain by training",
        "times",
        _plain("untrained_factor"),
        "validation perplexity of the untrained model over that of the trained one",
    ),
    Column(
        "gradient error",
        "",
        _gradient_error,
        "|mean gradient as received minus exact mean gradient| / |exact|, on the audited steps",
    ),
    Column(
        "peak memory",
        "MB/rank",
        _plain("memory_peak_bytes", scale=_MB),
        "largest resident set of a rank",
    ),
]

BREAKDOWN = [
    RUN,
    Column(
        "profiled step",
        "ms",
        _plain("profiled_step_ms"),
        "wall time of the traced steps; tracing makes it longer than the timed step",
    ),
    Column("compute", "ms", _plain("compute_ms"), "time in which an operator computed"),
    Column("exposed comm.", "ms", _plain("exposed_comm_ms"), "communication that no compute hid"),
    Column("idle", "ms", _plain("idle_ms"), "neither; compute + exposed + idle = step"),
    Column("communication", "ms", _plain("comm_ms_per_step"), "time in which a collective ran"),
    Column("by operation", "ms", _by_operation, "that time, for each kind of collective", False),
    Column(
        "in backward",
        "% of backward",
        _share("backward_comm_share"),
        "the share of communication inside the backward pass",
    ),
    Column("step p50", "ms", _plain("step_ms_p50"), "median of the timed steps"),
    Column("step p90", "ms", _plain("step_ms_p90"), "90th percentile of the timed steps"),
    Column("step p95", "ms", _plain("step_ms_p95"), "95th percentile of the timed steps"),
]

CODECS = [
    RUN,
    Column("encode", "ms/step", _plain("encode_ms"), "time in the codec before sending"),
    Column("decode", "ms/step", _plain("decode_ms"), "time in the codec after receiving"),
    Column("index", "kB/step", _plain("index_bytes", scale=1e-3), "bytes that say which elements"),
    Column(
        "metadata", "kB/step", _plain("metadata_bytes", scale=1e-3), "scales, counts and headers"
    ),
    Column("density", "% sent", _optional("density", scale=100), "share of the elements sent"),
    Column(
        "extra collectives",
        "1/step",
        _plain("extra_collectives"),
        "those that only the codec needs",
    ),
    Column(
        "residual", "norm", _optional("residual_norm"), "norm of what error feedback holds back"
    ),
    Column(
        "cosine",
        "",
        _optional("grad_cosine", 4),
        "between the mean gradient as received and the exact one, on the audited steps",
    ),
    Column("train loss", "nats", _spread("train_loss", 4), "mean of the last tenth of the steps"),
    Column(
        "clipped",
        "steps",
        _plain("clipped_steps"),
        "steps whose gradient norm was cut to the limit",
    ),
    Column("invalid", "steps", _plain("invalid_steps"), "steps left out: gradient not finite"),
]

NOTE = f"{ABSENT}: does not apply to this run."
