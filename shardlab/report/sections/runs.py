"""Sections on all runs: headline, plots, comparison, and breakdown of the step."""

import json

from shardlab.report.evidence import Evidence, section_of_runs
from shardlab.report.plots import breakdown_plot, bytes_quality_plot, loss_plot, step_time_plot
from shardlab.report.sections.appendix import setting_line
from shardlab.report.sections.scaling import IN_BACKWARD, STEP, STEP_RATIO, THROUGHPUT
from shardlab.report.tables import (
    ABSENT,
    MB,
    RUN,
    Cell,
    Column,
    Figure,
    Row,
    Section,
    Table,
    figure,
    or_disturbed,
    or_divergence,
    plain,
    share,
    spread,
    within,
    words,
)


def _ppl_change(row: Row) -> str:
    if row["is_baseline"]:
        return "baseline"
    change, low, high = (100 * (row[f"ppl_ratio{end}"] - 1) for end in ("", "_low", "_high"))
    return within(change, low, high, 2)


def _times_by(key: str) -> Cell:
    """Show milliseconds by name, from a JSON text."""

    def cell(row: Row) -> str:
        times = json.loads(row[key])
        return ", ".join(f"{name} {figure(ms)}" for name, ms in times.items()) or ABSENT

    return cell


WIRE = Column(
    "wire",
    "MB/step",
    plain("bytes_wire", scale=MB),
    "bytes sent per rank and step, indices, scales and headers included (1 MB = 10⁶ bytes)",
)
RATIO = Column(
    "ratio",
    "",
    plain("compression_ratio"),
    "compression ratio: raw bytes, which the best algorithm sends in float32, over wire bytes; "
    "below 1 for the reduce-scatter of gloo, which sends everything twice",
)
PPL = Column(
    "val. perplexity",
    "",
    or_divergence(spread("val_ppl", 4)),
    "perplexity of the saved model on the validation split, mean ± standard deviation over seeds",
)
PPL_CHANGE = Column(
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
    "exposed comm.",
    "ms",
    plain("exposed_comm_ms"),
    "communication per profiled step that did not overlap with compute",
)

HEADLINE = [RUN, STEP, STEP_RATIO, WIRE, RATIO, PPL, PPL_CHANGE, BITS]

COMPARISON = [
    RUN,
    Column(
        "strategy",
        "",
        words("strategy"),
        "label: engine, gradient codec, and every option that is not the default",
        False,
    ),
    Column("seeds", "", words("seeds"), "number of seeds"),
    STEP,
    STEP_RATIO,
    THROUGHPUT,
    Column(
        "raw",
        "MB/step",
        plain("bytes_raw", scale=MB),
        "bytes that a rank would send per step without a codec",
    ),
    WIRE,
    RATIO,
    Column(
        "communication",
        "% of step",
        share("comm_share"),
        "fraction of the profiled steps in which a collective ran (union of intervals)",
    ),
    EXPOSED,
    Column(
        "overlap",
        "% of comm.",
        share("overlap"),
        "fraction of the communication that overlapped with compute",
    ),
    PPL,
    PPL_CHANGE,
    BITS,
    Column(
        "perplexity gain",
        "times",
        plain("untrained_factor"),
        "validation perplexity of the untrained model over that of the trained one",
    ),
    Column(
        "peak memory",
        "MB/rank",
        plain("memory_peak_bytes", scale=MB),
        "largest resident set size of a rank in training, interpreter and libraries included",
    ),
]

BREAKDOWN = [
    RUN,
    Column(
        "profiled step",
        "ms",
        plain("profiled_step_ms"),
        "wall time of the traced steps; tracing adds to it",
    ),
    Column("forward", "ms", plain("forward_ms"), "the forward pass"),
    Column("backward", "ms", plain("backward_ms"), "the backward pass"),
    Column(
        "update",
        "ms",
        plain("update_ms"),
        "the rest of the step: gradient clipping, optimizer, waits",
    ),
    Column("compute", "ms", plain("compute_ms"), "time in which an operator ran"),
    EXPOSED,
    Column(
        "exposed copies",
        "ms",
        plain("exposed_copy_ms"),
        "copies to, from and on devices that overlapped with neither compute nor communication; on "
        "the CPU copies are compute",
    ),
    Column("idle", "ms", plain("idle_ms"), "the rest; these four sum to the step"),
    Column("in collectives", "ms", plain("comm_ms_per_step"), "time in which a collective ran"),
    Column(
        "skew",
        "ms",
        plain("comm_skew_ms"),
        "part of that: waiting until the last rank entered the same collective",
    ),
    Column("transfer", "ms", plain("comm_transfer_ms"), "the rest of that: transfer of bytes"),
    Column(
        "by operation",
        "ms",
        _times_by("comm_ms_by_op"),
        "communication by kind of collective",
        False,
    ),
    Column(
        "by unit",
        "ms",
        _times_by("comm_ms_by_unit"),
        "communication by unit of the model; other: of no unit, as the gradient norm",
        False,
    ),
    IN_BACKWARD,
    *(
        Column(
            f"training step p{share}",
            "ms",
            or_disturbed(plain(f"step_ms_p{share}"), "training_disturbed"),
            f"{share}th percentile of the steps of a training run; runs are minutes apart, so "
            "these are no comparison",
        )
        for share in (50, 90, 95)
    ),
]


def headline(evidence: Evidence) -> Section:
    """Show the table that also stands in the README, with what was measured."""
    table = headline_table(evidence)
    return Section(table.title, tables=[table], notes=[setting_line(evidence)])


def headline_table(evidence: Evidence) -> Table:
    """Return time, bytes and quality of every run."""
    return evidence.run_table("Headline", HEADLINE)


def plots(evidence: Evidence) -> Section:
    """Show loss, step time, bytes against quality, and where the step time goes."""
    compared, baseline = evidence.compared, evidence.baseline
    figures = [
        Figure(
            "loss",
            "Training loss, mean over seeds with a band of one standard deviation; below, the "
            "difference from the baseline at the same step.",
            loss_plot(evidence.loss_curves, evidence.runs, baseline),
        ),
        Figure(
            "step_time",
            "Wall time of a step in the timing of all runs. The line marks the baseline.",
            step_time_plot(compared, baseline),
        ),
        Figure(
            "bytes_quality",
            "Quality against compression. Markers show the engine; the line marks the baseline.",
            bytes_quality_plot(compared, baseline),
        ),
        Figure(
            "breakdown",
            "Compute, exposed communication, exposed copies and idle time sum to the profiled "
            "step.",
            breakdown_plot(compared),
        ),
    ]
    return Section("Plots", figures=figures)


comparison = section_of_runs("Comparison", COMPARISON)
breakdown = section_of_runs("Step breakdown", BREAKDOWN)
