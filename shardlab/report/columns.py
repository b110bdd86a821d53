"""Columns of the tables with a row per run or per timed run: heading, unit, value and meaning."""

import json
from dataclasses import replace

import pandas as pd

from shardlab.core.link import FRAME_HEADERS
from shardlab.core.numbers import ABSENT, figure, scientific, within
from shardlab.report.tables import (
    DISTURBED,
    PAUSED,
    RUN,
    Cell,
    Column,
    Row,
    estimate,
    interval,
    speed_up,
    spread,
)


def _step(row: Row) -> str:
    marks = [PAUSED] * bool(row["paused"]) + [DISTURBED] * bool(row["disturbed"])
    return " ".join([spread("step_ms")(row), *marks])


def _of_bound(row: Row) -> str:
    mean, high, low = (100 / ratio for ratio in estimate(row, "bound_ratio"))
    return figure(mean) if low == high else within(mean, low, high, 1)


def _quality(name: str) -> Cell:
    """Show a measure of quality, or at which step the run diverged."""
    return lambda row: row["divergence"] or spread(name, 4)(row)


def _ppl_change(row: Row) -> str:
    if row["is_baseline"] or row["divergence"]:
        return row["divergence"] or "baseline"
    change, low, high = (100 * (ratio - 1) for ratio in estimate(row, "ppl_ratio"))
    return within(change, low, high, 1)


def _gradient_error(row: Row) -> str:
    error = row["grad_rel_error"]
    return scientific(error) if 0 < error < 1e-3 else figure(error)


def _by_name(name: str) -> Cell:
    """Show numbers by name, from a JSON text."""

    def cell(row: Row) -> str:
        numbers = json.loads(row[name]).items()
        return ", ".join(f"{key} {figure(number)}" for key, number in numbers) or ABSENT

    return cell


RANKS = Column("ranks", "", "world_size", "number of processes")
MICRO_BATCHES = Column("micro-batches", "", "accumulation", "parts of a step of a rank")
LINK = Column("link", "", "link", "loopback, or rate and delay of an emulated link", numeric=False)
_OF_STEP = (
    "wall time of a step of the slowest rank in a timing; mean ± standard deviation over "
    "repetitions, in each of which every run makes one step"
)
STEP = Column("step", "ms", _step, _OF_STEP)
STEP_RATIO = Column(
    "step / baseline",
    "",
    lambda row: "1 (baseline)" if row["is_baseline"] else interval("step_ratio")(row),
    "step time over that of the baseline: geometric mean of the ratios of steps of the same "
    "repetition of one timing, with its 95 % confidence interval (Student's t on the logarithms)",
)
GAIN = Column(
    "against one device",
    "times as fast",
    speed_up("alone_ratio"),
    "time that one device alone takes for the tokens of a step of all ranks, over the step: it "
    "makes as many steps as there are ranks, timed in the same turns while the others wait; with "
    "the 95 % confidence interval over repetitions of this one timing. Absent where one device was "
    "not timed in the same turns, and where ranks share cores",
)
THROUGHPUT = Column("throughput", "tokens/s", "tokens_per_s", "tokens of a step, all ranks")
WIRE = Column(
    "wire", "MB/step", "bytes_wire", "bytes sent per rank and step, metadata included (10⁶ bytes)"
)
RATIO = Column(
    "ratio",
    "",
    "compression_ratio",
    "compression ratio: raw bytes, which the best algorithm sends in float32, over wire bytes; "
    "below 1 for the reduce-scatter of gloo, which sends everything twice",
)
PERPLEXITY = Column(
    "val. perplexity",
    "",
    _quality("val_ppl"),
    "perplexity of the saved model on the validation split, mean ± standard deviation over seeds",
)
PERPLEXITY_CHANGE = Column(
    "perplexity change",
    "%",
    _ppl_change,
    "validation perplexity relative to the baseline: geometric mean of the ratios of runs with the "
    "same seed minus 1, with its 95 % confidence interval; an interval that contains 0 is no "
    "evidence of a difference",
)
BITS = Column(
    "bits per byte",
    "",
    spread("val_bits_per_byte", 4),
    "validation loss in bits per byte of text; comparable between tokenizers",
)
EXPOSED = Column(
    "exposed comm.", "ms", "exposed_comm_ms", "communication not overlapped with compute"
)
EXPOSED_TIMED = Column(
    "exposed, timed",
    "% of step",
    "exposed_share",
    "exposed communication in traced steps of a timing",
)
RESIDUAL = Column("residual", "norm", "residual_norm", "norm of the error feedback residual")
IN_BACKWARD = Column(
    "in backward", "% of backward", "backward_comm_share", "backward pass with a collective running"
)


def comparison(first: str, group: pd.DataFrame) -> list[Column]:
    """Return the columns of the comparison: costs, then times on each link.

    Args:
        first: the timing that the ratios and all but the other steps are of.
        group: rows of timings that differ in the link.
    """
    links = dict(group[["timing", "link"]].drop_duplicates("timing").to_numpy())
    others = [timing for timing in links if timing != first]
    meaning = "step time on this link"
    return [
        RUN,
        PERPLEXITY_CHANGE,
        Column("peak memory", "MB/rank", "memory_peak_bytes", "resident set; on a GPU its tensors"),
        Column(f"step, {links[first]}", "ms", _step, _OF_STEP),
        GAIN,
        STEP_RATIO,
        *(Column(f"step, {links[t]}", "ms", in_timing(group, t, _step), meaning) for t in others),
        WIRE,
        *(replace(column, extra=True) for column in _FOLDED),
    ]


def in_timing(group: pd.DataFrame, timing: str, cell: Cell) -> Cell:
    """Show what a run has in one timing; a dash where it was not timed."""
    rows = {row["run"]: row for row in group[group["timing"] == timing].to_dict("records")}
    return lambda row: cell(rows[row["run"]]) if row["run"] in rows else ABSENT


def _ratio_of(kind: str) -> Column:
    return Column(f"{kind} ratio", "", f"{kind}_ratio", f"raw over wire bytes of {kind}")


_FOLDED = [
    Column("strategy", "", "strategy", "engine, codec, and what is not the default", numeric=False),
    PERPLEXITY,
    BITS,
    Column("perplexity gain", "times", "untrained_factor", "perplexity before over after training"),
    THROUGHPUT,
    RATIO,
    _ratio_of("gradients"),
    RESIDUAL,
    Column("communication", "% of step", "comm_share", "traced steps with a collective running"),
    EXPOSED,
    Column("overlap", "% of comm.", "overlap", "communication overlapped with compute"),
]
BREAKDOWN = [
    RUN,
    Column("profiled step", "ms", "profiled_step_ms", "traced steps; tracing adds to them"),
    Column("forward", "ms", "forward_ms"),
    Column("backward", "ms", "backward_ms"),
    Column("update", "ms", "update_ms", "rest of the step: gradient clipping, optimizer, waits"),
    Column("compute", "ms", "compute_ms", "time in which an operator ran"),
    EXPOSED,
    Column("exposed copies", "ms", "exposed_copy_ms", "copies overlapped with neither of these"),
    Column("idle", "ms", "idle_ms", "the rest; these four sum to the step"),
    Column("in collectives", "ms", "comm_ms_per_step", "time in which a collective ran"),
    Column("skew", "ms", "comm_skew_ms", "part of that: waiting for the last rank to enter"),
    Column("transfer", "ms", "comm_transfer_ms", "the rest of that: transfer of bytes"),
    Column("by operation", "ms", _by_name("comm_ms_by_op"), "by kind of collective", False),
    IN_BACKWARD,
]


def _of_kind(kind: str, codec: str) -> list[Column]:
    """Return the columns on one kind of messages."""
    raw, wire = f"{kind}_bytes_raw", f"{kind}_bytes_wire"
    return [
        Column(f"{kind} codec", "", f"{kind}_codec", codec, numeric=False),
        Column(f"{kind} raw", "MB/step", raw, f"raw bytes of {kind}"),
        Column(f"{kind} wire", "MB/step", wire, f"wire bytes of {kind}"),
        _ratio_of(kind),
    ]


TRAFFIC = [
    RUN,
    *_of_kind("gradients", "codec of gradients; with two levels, also the one between nodes"),
    *_of_kind("weights", "codec of parameters in all-gather"),
    Column("peak", "MB", "bytes_peak", "sent in the step that sends most: one with an exchange"),
    Column("between nodes", "MB/step", "bytes_between_nodes", "sent to other nodes"),
    Column("indices", "kB/step", "index_bytes", "bytes of indices of elements"),
    Column("metadata", "kB/step", "metadata_bytes", "bytes of scales, counts and headers"),
    Column("collectives", "1/step", "collectives", "number of collectives"),
    Column("extra collectives", "1/step", "extra_collectives", "those that only codecs need"),
    Column(
        "sent uncompressed",
        "messages/step",
        _by_name("uncompressed"),
        "messages that are sent without their codec, by reason",
        numeric=False,
    ),
]
CODECS = [
    RUN,
    Column("error feedback", "", "error_feedback", "data type of the residual", numeric=False),
    Column("encode", "ms/step", "encode_ms", "time of encoding before sending"),
    Column("decode", "ms/step", "decode_ms", "time of decoding after receiving"),
    Column("density", "% sent", "density", "elements that a sparse codec sends"),
    RESIDUAL,
    Column(
        "gradient error",
        "",
        _gradient_error,
        "|decoded mean gradient - exact mean gradient| / |exact|, on the audited steps",
    ),
    Column("cosine", "", "grad_cosine", "cosine similarity of these two gradients", digits=4),
    Column("train loss", "nats", _quality("train_loss"), "mean over the last tenth of the steps"),
    Column("clipped", "steps", "clipped_steps", "steps with gradient clipping"),
    Column("skipped", "steps", "skipped_steps", "steps skipped: gradient not finite"),
]
EFFICIENCY = [
    RUN,
    Column(
        "memory growth",
        "MB/rank",
        "memory_growth_bytes",
        "growth of the largest rank from before the model is built to its peak in training, "
        "without mapped files; the allocator of the C library keeps some freed memory, which "
        "no estimate contains",
    ),
    Column(
        "estimate",
        "MB/rank",
        "memory_estimate_bytes",
        "peak of a step by formula, from model and strategy, without the buffers of codecs",
    ),
    Column("growth / estimate", "", "memory_ratio", "measured growth over the estimate"),
    Column(
        "FLOPs utilization",
        "%",
        "flops_share",
        "model FLOPs per second at the throughput of the timing, 6 N + 12 L H Q T per token "
        "(Chowdhery et al. 2022, appendix B), over the most FLOPs per second of matrix "
        "products that a run of the same type measured, on all ranks",
    ),
    Column("scaling efficiency", "%", "scaling_efficiency", "throughput per rank over one rank's"),
    Column(
        "effective bandwidth",
        "MB/s",
        "effective_bandwidth_raw",
        "raw bytes over the time of training steps with a collective in flight, waits included",
    ),
]
SCALING = [
    RUN,
    RANKS,
    STEP,
    GAIN,
    THROUGHPUT,
    Column(
        "efficiency",
        "% of one rank",
        "efficiency",
        "tokens per second and rank relative to the same run on one rank; ranks of one machine "
        "share its cores and memory bandwidth",
    ),
    Column(
        "of no-comm. bound",
        "%",
        _of_bound,
        "no-communication bound, the step time of as many ranks that each train the whole model "
        "without communication, over the step time; with its 95 % confidence interval over "
        "repetitions",
    ),
    IN_BACKWARD,
    EXPOSED_TIMED,
]
TIMED = [
    RUN,
    RANKS,
    LINK,
    STEP,
    GAIN,
    STEP_RATIO,
    THROUGHPUT,
    Column("ledger", "MB/step", "bytes_wire", "bytes that a rank sent, as the library counts them"),
    Column(
        "interface excess",
        "%",
        "interface_excess",
        "excess of what the network interface of a node counted over the ledger, less "
        f"{FRAME_HEADERS} bytes of headers per frame: control messages of gloo, and what torch "
        "sends apart from codecs, such as the gradient norm",
    ),
    IN_BACKWARD,
    EXPOSED_TIMED,
]
