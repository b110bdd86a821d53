"""Time and memory of reading a large trace, compared with other readers.

    python -m benchmarks.traces [--mb SIZE] [--repetitions R] [--work FOLDER]

A real trace of two ranks is made as large as asked for by repeating rank 0's steps, each time
later, in Kineto's own layout. Every reader has a process of its own and all take turns; the fastest
round counts. Seconds are those of reading, imports included; memory is the largest resident set of
the process, the interpreter included.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import WORK, arguments, print_table, write_results
from benchmarks.engines import STRATEGIES
from benchmarks.trace_readers import WAYS
from benchmarks.traced import trace
from shardlab.config.strategy import parse_strategy
from shardlab.profiling.merge import merge_traces
from shardlab.report.tables import figure

_STEPS = 3
_BOUNDARY = "\n  },\n  {"
_TS = re.compile(r'"ts": (\d+)')
_STEP = re.compile(r"ProfilerStep#(\d+)")


def main() -> None:
    args = arguments(
        __doc__, mb=(250.0, "size of the trace in 10^6 bytes"), repetitions=3, work=WORK
    )
    with tempfile.TemporaryDirectory(prefix="shardlab-traces-") as folder:
        small, *others = trace(parse_strategy(STRATEGIES["fsdp2"]), "tiny", 2, _STEPS, Path(folder))
        large, compressed = Path(folder, "large.json"), Path(folder, "large.json.gz")
        with large.open("w") as file:
            file.writelines(repeated(small.read_text(), args.mb * 1e6))
        with large.open("rb") as source, gzip.open(compressed, "wb", 6) as target:
            shutil.copyfileobj(source, target)
        measured = _measured([large, compressed], args.repetitions)
        start = time.perf_counter()
        merge_traces([small, *others], Path(folder, "merged.json.gz"))
        merging = time.perf_counter() - start
        sizes = {path.name: path.stat().st_size / 1e6 for path in (large, compressed)}
    write_results(args.work / "traces.json", MB=sizes, readers=measured, merge_s=merging)
    _print(sizes, measured)
    print(f"Merging {1 + len(others)} traces of {_STEPS} steps: {1e3 * merging:.0f} ms.")


def repeated(text: str, size: float) -> Iterator[str]:
    """Yield Kineto's text of a trace with its steps repeated to `size` characters."""
    head, _, rest = text.partition('"traceEvents": [')
    body, _, tail = rest.rpartition("],")
    events = body.strip().removeprefix("{").removesuffix("}").rstrip().split(_BOUNDARY)
    lasting = [event for event in events if '"ph": "M"' in event]
    timed = [event for event in events if '"ph": "X"' in event and '"cat": "Trace"' not in event]
    times = [int(match[1]) for event in timed if (match := _TS.search(event))]
    period = max(times) - min(times) + 10**6
    yield f'{head}"traceEvents": [\n    \n  {{' + _BOUNDARY.join(lasting)
    written = done = 0
    while written < size:
        for event in timed:
            later = _BOUNDARY + _moved(event, done * period, done * _STEPS)
            written += len(later)
            yield later
        done += 1
    yield "\n  }\n  ]," + tail


def _moved(event: str, by: int, steps: int) -> str:
    """Return the event `by` us and so many steps later."""
    later = _TS.sub(lambda match: f'"ts": {int(match[1]) + by}', event, count=1)
    return _STEP.sub(lambda match: f"ProfilerStep#{int(match[1]) + steps}", later)


def _measured(paths: list[Path], repetitions: int) -> dict[str, dict[str, Any]]:
    """Return the figures of the fastest repetition by reader and file."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(repetitions):
        for path in paths:
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.trace_readers", way, str(path)]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found, key = json.loads(said), f"{way}: {path.name}"
                if key not in best or found["seconds"] < best[key]["seconds"]:
                    best[key] = found
    return best


def _print(sizes: dict[str, float], measured: dict[str, dict[str, Any]]) -> None:
    rows = [
        [way, figure(found["seconds"]), figure(found["cpu_s"]), figure(found["peak_mb"])]
        for way, found in measured.items()
    ]
    title = ", ".join(f"{name}: {size:.0f} MB" for name, size in sizes.items())
    headings = ["reader", "seconds", "CPU seconds of the process", "peak memory, MB"]
    print_table(title, headings, rows)


if __name__ == "__main__":
    main()
