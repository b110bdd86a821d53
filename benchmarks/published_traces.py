"""Breakdown of GPU time, compared with the reports that TraceLens (AMD) keeps beside its traces.

    git clone https://github.com/AMD-AGI/TraceLens
    python -m benchmarks.published_traces TraceLens/tests/traces

TraceLens divides the time from the first kernel or copy to the last, without what was launched
before the trace, and takes fills of memory for compute. So is done here, by the library's own
arithmetic. Reports that divide a trace into several timelines are left out.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import print_table
from shardlab.profiling.breakdown import StepTimes, step_times
from shardlab.profiling.trace import Launched, Trace
from shardlab.profiling.trace_reader import read_trace

_ROWS = {
    "computation_time": "compute_ms",
    "exposed_comm_time": "exposed_comm_ms",
    "exposed_memcpy_time": "exposed_copy_ms",
    "idle_time": "idle_ms",
    "total_time": "step_ms",
}


def main(folder: Path) -> None:
    """Print a row per trace: each part by both, and the largest difference."""
    rows, worst = [], 0.0
    for path, theirs in _published(folder):
        ((_, trace),) = read_trace(path).items()
        ours = _of_device(trace)
        differences = [abs(getattr(ours, name) - theirs[key]) for key, name in _ROWS.items()]
        share = 100 * max(differences) / theirs["total_time"]
        worst = max(worst, share)
        pairs = [f"{getattr(ours, name):.3f} / {theirs[key]:.3f}" for key, name in _ROWS.items()]
        rows.append([str(path.relative_to(folder)), *pairs, f"{share:.3f}"])
    headings = ["trace", *(key.removesuffix("_time") for key in _ROWS), "difference, % of total"]
    print_table("ms, ours / TraceLens", headings, rows)
    print(f"\nLargest difference: {worst:.3f} % of the total.")


def _published(folder: Path) -> Iterator[tuple[Path, dict[str, float]]]:
    """Yield the traces that lie beside a report of one timeline."""
    for report in sorted(folder.rglob("gpu_timeline.csv")):
        name = report.parent.name.removesuffix("_perf_report_csvs")
        beside = report.parents[1]
        of_folder = beside.glob("*.json.gz") if name == "perf_csvs" else []
        for path in [beside / f"{name}.json.gz", *of_folder]:
            with report.open(newline="") as file:
                times = [(row["type"], row.get("time ms")) for row in csv.DictReader(file)]
            # files that were not fetched are pointers of a few bytes
            if path.is_file() and path.stat().st_size > 1000 and len(times) == 8:
                yield path, {key: float(time or 0) for key, time in times}
                break


def _of_device(trace: Trace) -> StepTimes:
    """Return the times from the first event on the device to the last."""
    launched = trace.copies.launched
    fills = (trace.copies.kinds == "Memset") & np.isfinite(launched)
    copies = trace.copies.only(~fills & np.isfinite(launched))
    kernels = trace.kernels.only(np.isfinite(trace.kernels.launched))
    kernels = Launched(
        np.concatenate([kernels.times, trace.copies.times[fills]]),
        np.concatenate([kernels.launched, launched[fills]]),
    )
    collectives = trace.collectives.only(np.isfinite(trace.collectives.launched))
    trace = replace(trace, kernels=kernels, copies=copies, collectives=collectives)
    work = np.concatenate([each.times for each in trace.work])
    whole = np.array([[work[:, 0].min(), work[:, 1].max()]])
    (times,) = step_times({0: replace(trace, steps={1: whole})})
    return times


if __name__ == "__main__":
    main(Path(sys.argv[1]))
