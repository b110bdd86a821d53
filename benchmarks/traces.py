"""Time and memory of reading a large trace, compared with other readers.

    python -m benchmarks.traces [--mb SIZE] [--repetitions R] [--out FOLDER]

A trace of two ranks that train is made as large as asked for by repeating rank 0's steps, each time
later. Every reader has a process of its own, imports included, and all take turns; the fastest run
counts.
"""

import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from benchmarks.usage import HEADINGS, fastest_usage, print_usage

if TYPE_CHECKING:
    import torch.distributed as dist

_STEPS = 3


def analysis(path: Path) -> None:
    """Break every step of the trace down, by our reader."""
    from shardlab.profiling.breakdown import analyse

    analyse(path)


def reader(path: Path) -> None:
    """Load the trace, by our reader."""
    from shardlab.profiling.trace_file import load_trace

    load_trace(path)


def json_load(path: Path) -> None:
    """Load the file by the standard library."""
    with _opened(path) as file:
        json.load(file)


def ijson_items(path: Path) -> None:
    """Read event by event by ijson."""
    import ijson

    with _opened(path) as file:
        sum(1 for _ in ijson.items(file, "traceEvents.item", use_float=True))


WAYS: dict[str, Callable[[Path], None]] = {
    "shardlab, analysis": analysis,
    "shardlab, load": reader,
    "json": json_load,
    "ijson": ijson_items,
}


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def capture(folder: Path, group: "dist.ProcessGroup") -> None:
    """Trace steps of an engine on random tokens, to one file for each rank."""
    from benchmarks import engines
    from shardlab.profiling.capture import Capture

    case = engines.EngineCase("fsdp2", "tiny")
    engine = engines.engine_of(case, group)
    with Capture(_STEPS) as trace:
        for step in range(trace.calls):
            engine.step([engines.batch_of(case, step, group)], 1e-3)
            trace.step()
    trace.export(folder / f"rank{group.rank()}.json")


def repeat(source: Path, target: Path, size: float) -> None:
    """Write a trace with its steps repeated, each time later, until it has `size` bytes."""
    trace = json.loads(source.read_text())
    events = trace.pop("traceEvents")
    lasting = [event for event in events if event["ph"] != "X" or event.get("cat") == "Trace"]
    timed = [event for event in events if event["ph"] == "X" and event.get("cat") != "Trace"]
    starts = [event["ts"] for event in timed]
    period, turn = max(starts) - min(starts) + 1e6, 0
    with target.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [')
        file.write(", ".join(map(json.dumps, lasting)))
        while file.tell() < size:
            for event in timed:
                name, _, number = event["name"].partition("#")
                later = {**event, "ts": event["ts"] + turn * period}
                if name == "ProfilerStep":
                    later["name"] = f"{name}#{int(number) + turn * _STEPS}"
                file.write(",\n" + json.dumps(later))
            turn += 1
        file.write("]}\n")


def main() -> None:
    from benchmarks.common import arguments, on_ranks, publish, text_table

    args = arguments(__doc__, mb=(250.0, "size of the trace in 10^6 bytes"), repetitions=3)
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardlab-traces-") as folder:
        on_ranks(2, partial(capture, Path(folder)))
        large, compressed = Path(folder, "large.json"), Path(folder, "large.json.gz")
        repeat(Path(folder, "rank0.json"), large, args.mb * 1e6)
        with large.open("rb") as source, gzip.open(compressed, "wb", 6) as target:
            shutil.copyfileobj(source, target)
        for path in (large, compressed):
            usages = fastest_usage("benchmarks.traces", WAYS, [str(path)], args.repetitions)
            title = f"{path.name}, {path.stat().st_size / 1e6:.0f} MB"
            rows += [[title, way, *usage.cells()] for way, usage in usages.items()]
    table = text_table("Readers of a trace", ["file", "reader", *HEADINGS], rows)
    publish(__doc__, args.out / "traces.md", table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print_usage(partial(WAYS[sys.argv[2]], Path(sys.argv[3])))
    else:
        main()
