"""The columns on time and quality: title, unit, how a cell is written, what it means."""

import json

from shardlab.report.cells import MB, RUN, Cell, Column, Row, plain, share, spread, words
from shardlab.report.numbers import ABSENT, figure, within


def _step_ratio(row: Row) -> str:
    if row["is_baseline"]:
        return "1 (baseline)"
    return within(row["step_ratio"], row["step_ratio_low"], row["step_ratio_high"], 3)


def _ppl_change(row: Row) -> str:
    if row["is_baseline"]:
        return "baseline"
    change, low, high = (100 * (row[f"ppl_ratio{end}"] - 1) for end in ("", "_low", "_high"))
    return within(change, low, high, 2)


def _times_by(key: str) -> Cell:
    """Milliseconds by name, from a JSON text."""

    def cell(row: Row) -> str:
        times = json.loads(row[key])
        return ", ".join(f"{name} {figure(ms)}" for name, ms in times.items()) or ABSENT

    return cell


STEP = Column(
    "step",
    "ms",
    spread("step_ms_mean"),
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
    plain("bytes_wire", scale=MB),
    "bytes that one rank really sent per step, indices, scales and headers included "
    "(1 MB = 10⁶ bytes)",
)
RATIO = Column(
    "ratio",
    "",
    plain("compression_ratio"),
    "compression ratio: raw bytes, what the best algorithm would send as float32, over wire bytes; "
    "below 1 for gloo's own reduce-scatter, which sends everything twice",
)
PPL = Column(
    "val. perplexity",
    "",
    spread("val_ppl", 4),
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
    spread("val_bits_per_byte", 4),
    "validation loss in bits per byte of text; comparable between tokenizers",
)

HEADLINE = [RUN, STEP, STEP_RATIO, WIRE, RATIO, PPL, PPL_CHANGE, BITS]

COMPARISON = [
    RUN,
    Column(
        "strategy",
        "",
        words("strategy"),
        "engine, codec of the gradients, and every option that is not the default",
        False,
    ),
    Column("seeds", "", lambda row: str(row["seeds"]), "runs that the figures are taken over"),
    STEP,
    STEP_RATIO,
    Column("throughput", "tokens/s", spread("tokens_per_s", 3), "training tokens over all ranks"),
    Column(
        "raw",
        "MB/step",
        plain("bytes_raw", scale=MB),
        "bytes that one rank would have sent per step without a codec",
    ),
    WIRE,
    RATIO,
    Column(
        "communication",
        "% of step",
        share("comm_share"),
        "share of the profiled steps in which a collective ran (union of their intervals)",
    ),
    Column(
        "exposed",
        "ms",
        plain("exposed_comm_ms"),
        "communication that no compute hid, per profiled step",
    ),
    Column(
        "overlap",
        "% of comm.",
        share("overlap"),
        "part of the communication that ran while compute ran",
    ),
    PPL,
    PPL_CHANGE,
    BITS,
    Column(
        "gain by training",
        "times",
        plain("untrained_factor"),
        "validation perplexity of the untrained model over that of the trained one",
    ),
    Column(
        "peak memory",
        "MB/rank",
        plain("memory_peak_bytes", scale=MB),
        "largest resident set of a rank until the end of the steps, with interpreter and libraries",
    ),
]

BREAKDOWN = [
    RUN,
    Column(
        "profiled step",
        "ms",
        plain("profiled_step_ms"),
        "wall time of the traced steps; tracing makes it longer than the timed step",
    ),
    Column("forward", "ms", plain("forward_ms"), "the forward pass"),
    Column("backward", "ms", plain("backward_ms"), "the backward pass"),
    Column(
        "update",
        "ms",
        plain("update_ms"),
        "the rest of the step: clipping, optimizer, what it waits for",
    ),
    Column("compute", "ms", plain("compute_ms"), "time in which an operator computed"),
    Column("exposed comm.", "ms", plain("exposed_comm_ms"), "communication that no compute hid"),
    Column(
        "exposed copies",
        "ms",
        plain("exposed_copy_ms"),
        "copies to, from and on devices beside neither compute nor communication; on the CPU "
        "copies are compute",
    ),
    Column("idle", "ms", plain("idle_ms"), "the rest; these four add up to the step"),
    Column("communication", "ms", plain("comm_ms_per_step"), "time in which a collective ran"),
    Column(
        "skew",
        "ms",
        plain("comm_skew_ms"),
        "of that, waiting until the last rank had begun the same collective",
    ),
    Column("transfer", "ms", plain("comm_transfer_ms"), "of that, the rest: bytes moved"),
    Column(
        "by operation",
        "ms",
        _times_by("comm_ms_by_op"),
        "communication, for each kind of collective",
        False,
    ),
    Column(
        "by unit",
        "ms",
        _times_by("comm_ms_by_unit"),
        "communication, for each unit of the model whose values moved; other: of none, as the norm "
        "of the gradient",
        False,
    ),
    Column(
        "in backward",
        "% of backward",
        share("backward_comm_share"),
        "the share of communication inside the backward pass",
    ),
    Column("step p50", "ms", plain("step_ms_p50"), "median of the timed steps"),
    Column("step p90", "ms", plain("step_ms_p90"), "90th percentile of the timed steps"),
    Column("step p95", "ms", plain("step_ms_p95"), "95th percentile of the timed steps"),
]

NOTE = f"{ABSENT}: does not apply to this run."
