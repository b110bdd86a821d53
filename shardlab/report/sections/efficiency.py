"""Sections on the use of memory, compute and link, and on time to quality."""

import math
from collections.abc import Sequence
from statistics import fmean

from shardlab.records.run import Record
from shardlab.report.evidence import Evidence
from shardlab.report.numbers import optional
from shardlab.report.section import Section
from shardlab.report.tables import MB, RUN, Column, plain, share, where_known

EFFICIENCY = [
    RUN,
    Column(
        "memory growth",
        "MB/rank",
        plain("memory_growth_bytes", scale=MB),
        "growth of the largest rank from before the model is built to its peak in training, "
        "without mapped files; the allocator of the C library keeps some freed memory, which "
        "no estimate contains",
    ),
    Column(
        "estimate, traced",
        "MB/rank",
        where_known("memory_estimate_bytes", scale=MB),
        "peak of a step on fake tensors before the run, without the buffers of codecs",
    ),
    Column(
        "estimate, closed form",
        "MB/rank",
        where_known("memory_closed_form_bytes", scale=MB),
        "the same by formula, from model and strategy",
    ),
    Column(
        "growth / estimate",
        "",
        where_known("memory_ratio"),
        "measured growth over the traced estimate, or over the closed form if there is none",
    ),
    Column(
        "reserved",
        "MB/rank",
        where_known("memory_reserved_bytes", scale=MB),
        "peak memory reserved by torch on a GPU",
    ),
    Column(
        "FLOPs utilization",
        "%",
        share("flops_share"),
        "model FLOPs per second, 6 N + 12 L H Q T per token (Chowdhery et al. 2022, appendix B), "
        "over the measured FLOPs per second of matrix products of the same type on all ranks",
    ),
    Column(
        "matrix product",
        "GFLOP/s",
        plain("product_flops_per_s", scale=1e-9),
        "best square matrix product of a rank while all ranks multiply",
    ),
    Column(
        "scaling efficiency",
        "%",
        where_known("scaling_efficiency", scale=100),
        "tokens per second and rank relative to the same strategy on one rank, from timings",
    ),
    Column(
        "timed collectives",
        "ms/step",
        where_known("collective_ms"),
        "time of a timed step with at least one collective in flight, waits included",
    ),
    Column(
        "bandwidth, raw",
        "MB/s",
        where_known("effective_bandwidth_raw", scale=MB),
        "raw bytes over the time in collectives: apparent bandwidth of the link",
    ),
    Column(
        "bandwidth, wire",
        "MB/s",
        where_known("effective_bandwidth_wire", scale=MB),
        "wire bytes over the time in collectives",
    ),
]


def efficiency(evidence: Evidence) -> Section:
    """Show memory, use of compute, and effective bandwidth of every run."""
    table = evidence.run_table("Memory, compute and link", EFFICIENCY)
    return Section(table.title, tables=[table])


def time_to_quality(evidence: Evidence) -> Section | None:
    """Show time to each loss and loss at each time; None if the parameters ask for neither."""
    columns = quality_columns(evidence.records)
    if not columns:
        return None
    title = "Time to quality"
    return Section(title, tables=[evidence.run_table(title, [RUN, *columns])])


def quality_columns(records: Sequence[Record]) -> list[Column]:
    """Return the columns for the losses and times that the records contain."""
    first = records[0]
    columns = [
        column
        for loss in sorted(first.time_to_quality_s, key=float, reverse=True)
        for column in (
            _mean_of(records, "steps_to_quality", loss, f"to loss {loss}", "steps"),
            _mean_of(records, "time_to_quality_s", loss, f"to loss {loss}", "s"),
        )
    ]
    return columns + [
        _mean_of(records, "quality_at_time", moment, f"loss after {moment} s", "nats")
        for moment in sorted(first.quality_at_time, key=float)
    ]


_MEANINGS = {
    "steps_to_quality": "steps until the training loss, smoothed over a twentieth of the run, is "
    "reached; absent if a seed does not reach it",
    "time_to_quality_s": "the same in seconds of training",
    "quality_at_time": "smoothed training loss of the last step that ended by then",
}


def _mean_of(records: Sequence[Record], field: str, key: str, title: str, unit: str) -> Column:
    """Return a column with the mean over seeds; absent if a seed has no value."""
    found: dict[str, list[float | None]] = {}
    for record in records:
        found.setdefault(record.run, []).append(getattr(record, field).get(key))
    means = {
        run: fmean(v for v in values if v is not None) if None not in values else math.nan
        for run, values in found.items()
    }
    return Column(title, unit, lambda row: optional(means[str(row["run"])]), _MEANINGS[field])
