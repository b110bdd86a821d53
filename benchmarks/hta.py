"""Overlap and exposed communication, compared with HolisticTraceAnalysis (Meta), on real traces.

    make rivals
    python -m benchmarks.hta [STRATEGY ...] [--preset NAME] [--steps S] [--rivals FOLDER]

HTA knows work on GPUs alone. So every trace is adapted: operators that compute become kernels of
stream 7, collectives become NCCL kernels of stream 20, each with a launch. Which operators compute
is decided here by a tree of the events of each thread, and not by the library.
"""

import json
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RIVAL_PACKAGES, arguments, choose, print_table
from benchmarks.engines import STRATEGIES
from benchmarks.traced import trace
from shardlab.config.strategy import parse_strategy
from shardlab.profiling.breakdown import read_steps
from shardlab.profiling.merge import merge_traces
from shardlab.report.numbers import figure

_DEFAULT = ("ddp", "fsdp2", "fsdp2-ahead", "manual")
_WAITS = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")
Event = dict[str, Any]


class Figures(NamedTuple):
    """Figures of all steps of one rank."""

    overlap: float
    """% of communication"""
    exposed: float
    """% of the time from the first to the last"""


def main() -> None:
    args = arguments(
        __doc__,
        ("strategies", "of benchmarks.engines"),
        preset="tiny",
        steps=5,
        world_size=2,
        rivals=RIVAL_PACKAGES,
    )
    if not (args.rivals / "hta").is_dir():
        raise SystemExit(f"{args.rivals}: no HolisticTraceAnalysis there: run make rivals")
    sys.path.append(str(args.rivals))
    rows, worst = [], 0.0
    for name in choose(args.strategies, STRATEGIES, _DEFAULT):
        with tempfile.TemporaryDirectory(prefix="shardlab-hta-") as folder:
            strategy = parse_strategy(STRATEGIES[name])
            paths = trace(strategy, args.preset, args.world_size, args.steps, Path(folder))
            for rank, (ours, theirs) in enumerate(zip(_ours(paths), _theirs(paths), strict=True)):
                worst = max(worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
                rows.append([name, str(rank), *map(figure, (*ours, *theirs))])
    headings = ["strategy", "rank"] + [
        f"{what}, {whose}"
        for whose in ("ours", "HTA")
        for what in ("overlap, % of comm.", "exposed, % of time")
    ]
    title = f"{args.preset}, {args.world_size} ranks, {args.steps} steps"
    print_table(title, headings, rows)
    print(f"\nLargest difference: {worst:.2f} points.")


def _ours(paths: list[Path]) -> list[Figures]:
    merged = paths[0].with_name("merged.json.gz")
    merge_traces(paths, merged)
    steps = read_steps(merged)
    result = []
    for rank in range(len(paths)):
        mine = [t for t in steps if t.rank == rank]
        comm, exposed, whole = (
            sum(getattr(t, key) for t in mine) for key in ("comm_ms", "exposed_comm_ms", "step_ms")
        )
        result.append(Figures(100 * (1 - exposed / comm), 100 * exposed / whole))
    return result


def _theirs(paths: list[Path]) -> list[Figures]:
    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.INFO)

    adapted = {}
    for rank, path in enumerate(paths):
        adapted[rank] = str(path.with_name(f"adapted{rank}.json"))
        Path(adapted[rank]).write_text(json.dumps(_adapted(json.loads(path.read_text()))))
    analysis = TraceAnalysis(adapted, include_last_profiler_step=True)
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    times = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    return [
        Figures(
            overlap["comp_comm_overlap_pctg"][rank],
            # nothing but communication is neither compute nor idle
            100 * times["non_compute_time(us)"][rank] / times["kernel_time(us)"][rank],
        )
        for rank in range(len(paths))
    ]


def _adapted(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the trace as if the CPU were a GPU; times in ns, as HTA rounds them."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and isinstance(e["pid"], int)]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    begin = min(e["ts"] for e in steps)
    end = max(e["ts"] + e["dur"] for e in steps)
    correlations = count(1)
    result = [_scaled(step, begin) for step in steps]
    for event in _work(events, _workers(trace)):
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if start < stop:
            clipped = {**event, "ts": start, "dur": stop - start}
            result += _launched(_scaled(clipped, begin), next(correlations))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "CPU", "numSms": 1}],
        "distributedInfo": trace["distributedInfo"],
        "traceEvents": result,
    }


def _workers(trace: dict[str, Any]) -> set[int]:
    return {
        e["tid"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and "pt_gloo_runloop" in e["args"]["name"]
    }


def _work(events: list[Event], workers: set[int]) -> Iterator[Event]:
    """Return collectives and the outermost operators without communication in them."""
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["name"].startswith("gloo:"):
            yield event
        if event["cat"] in ("cpu_op", "user_annotation") and event["tid"] not in workers:
            threads[event["tid"]].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        yield from _outermost(of_thread)


def _outermost(events: list[Event]) -> Iterator[Event]:
    parents: list[Event] = []
    for event in events:
        while parents and event["ts"] >= parents[-1]["ts"] + parents[-1]["dur"] - 1e-3:
            parents.pop()
        event["parents"] = list(parents)
        parents.append(event)
        if not _computes(event):
            for parent in event["parents"]:
                parent["waits"] = True
    for event in events:
        if _computes(event) and "waits" not in event:
            inside = any(_computes(p) and "waits" not in p for p in event["parents"])
            if not inside:
                yield event


def _computes(event: Event) -> bool:
    name = event["name"]
    return event["cat"] == "cpu_op" and "::" in name and not name.startswith(_WAITS)


def _scaled(event: Event, begin: float) -> Event:
    kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid")}
    return {**kept, "ts": round(1e3 * (event["ts"] - begin)), "dur": round(1e3 * event["dur"])}


def _launched(event: Event, correlation: int) -> list[Event]:
    communicates = event["name"].startswith("gloo:")
    stream = 20 if communicates else 7
    name = f"ncclDevKernel_{event['name'][5:]}_RING_LL" if communicates else event["name"]
    args = {"device": 0, "stream": stream, "correlation": correlation, "External id": correlation}
    kernel = {"cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": args}
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1}
    host = {"args": {"correlation": correlation, "External id": correlation}}
    return [{**event, **kernel}, {**event, **launch, **host}]


if __name__ == "__main__":
    main()
