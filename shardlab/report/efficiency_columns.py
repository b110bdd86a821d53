"""The columns on what a run makes of memory, processor and link; and how soon it was how good."""

import math
from collections.abc import Sequence
from statistics import fmean

from shardlab.records.run import Record
from shardlab.report.cells import MB, RUN, Column, plain, share, where_known
from shardlab.report.numbers import ABSENT, figure

EFFICIENCY = [
    RUN,
    Column(
        "memory growth",
        "MB/rank",
        plain("memory_growth_bytes", scale=MB),
        "how far the largest rank grew from before the model was built to its peak in the steps, "
        "without mapped files; the C library keeps part of what was freed, which no estimate knows",
    ),
    Column(
        "estimate, traced",
        "MB/rank",
        where_known("memory_estimate_bytes", scale=MB),
        "peak of a step as torch's trackers see it on tensors without data, before the run; what "
        "codecs keep is not in it",
    ),
    Column(
        "estimate, closed form",
        "MB/rank",
        where_known("memory_closed_form_bytes", scale=MB),
        "the same by formula, from the sizes of the model and the strategy",
    ),
    Column(
        "growth / estimate",
        "",
        where_known("memory_ratio"),
        "measured growth over the traced estimate, or over the closed form where nothing is traced",
    ),
    Column(
        "reserved",
        "MB/rank",
        where_known("memory_reserved_bytes", scale=MB),
        "most that torch reserved on a GPU",
    ),
    Column(
        "share of FLOPs",
        "%",
        share("flops_share"),
        "model FLOPs per second, 6 N + 12 L H Q T per token (Chowdhery et al. 2022, appendix B), "
        "over those of matrix products that all ranks do at once in the same type",
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
        "tokens per second and rank against those of the same strategy on one rank, from timings",
    ),
    Column(
        "in collectives",
        "ms/step",
        where_known("collective_ms"),
        "time of a timed step with one collective or more under way, waits included",
    ),
    Column(
        "bandwidth, raw",
        "MB/s",
        where_known("effective_bandwidth_raw", scale=MB),
        "raw bytes over the time in collectives: what the link seems to carry",
    ),
    Column(
        "bandwidth, wire",
        "MB/s",
        where_known("effective_bandwidth_wire", scale=MB),
        "bytes on the wire over the time in collectives",
    ),
]


def reached_columns(records: Sequence[Record]) -> list[Column]:
    """How soon each run was how good; none without thresholds."""
    first = records[0]
    columns = [
        column
        for loss in sorted(first.time_to_quality_s, key=float, reverse=True)
        for column in (
            _mean_of(records, "steps_to_quality", loss, f"to a loss of {loss}", "steps"),
            _mean_of(records, "time_to_quality_s", loss, f"to a loss of {loss}", "s"),
        )
    ]
    columns += [
        _mean_of(records, "quality_at_time", moment, f"loss after {moment} s", "nats")
        for moment in sorted(first.quality_at_time, key=float)
    ]
    return [RUN, *columns] if columns else []


_MEANINGS = {
    "steps_to_quality": "steps until the training loss, smoothed over a twentieth of the run, was "
    "reached; absent if a seed did not get there",
    "time_to_quality_s": "the same in seconds of training",
    "quality_at_time": "smoothed training loss of the last step that had ended by then",
}


def _mean_of(records: Sequence[Record], field: str, key: str, title: str, unit: str) -> Column:
    """Over seeds."""
    found: dict[str, list[float | None]] = {}
    for record in records:
        found.setdefault(record.run, []).append(getattr(record, field).get(key))
    means = {
        run: fmean(v for v in values if v is not None) if None not in values else math.nan
        for run, values in found.items()
    }

    def cell(row: dict[str, object]) -> str:
        mean = means[str(row["run"])]
        return ABSENT if math.isnan(mean) else figure(mean)

    return Column(title, unit, cell, _MEANINGS[field])
