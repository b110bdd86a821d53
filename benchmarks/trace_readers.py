"""One reader of traces, in a separate process: `python -m benchmarks.trace_readers WAY PATH`.

Prints seconds and the peak of its resident memory as JSON. Nothing is imported that the way does
not need, since imports are part of both.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast


def analysis(path: Path) -> int:
    """Break every step of the trace down, by our reader."""
    from shardlab.profiling.breakdown import read_steps, summarize

    steps = read_steps(path)
    summarize(steps)
    return len(steps)


def reader(path: Path) -> int:
    """Read every event once, by our reader."""
    from shardlab.profiling.trace_file import load_trace

    return len(load_trace(path).events)


def json_load(path: Path) -> int:
    """Load the file by the standard library."""
    with _text(path) as file:
        return len(json.load(file)["traceEvents"])


def orjson_loads(path: Path) -> int:
    """Load the file by orjson."""
    import orjson

    with _text(path) as file:
        return len(orjson.loads(file.read())["traceEvents"])


def ijson_items(path: Path) -> int:
    """Read event by event by ijson."""
    import ijson

    with _text(path) as file:
        return sum(1 for _ in ijson.items(file, "traceEvents.item", use_float=True))


WAYS: dict[str, Callable[[Path], int]] = {
    "shardlab, analysis": analysis,
    "shardlab, events": reader,
    "json": json_load,
    "orjson": orjson_loads,
    "ijson": ijson_items,
}


def _text(path: Path) -> IO[bytes]:
    import gzip

    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def main(way: str, path: str) -> None:
    """Read the file and print seconds and memory."""
    start = time.perf_counter()
    found = WAYS[way](Path(path))
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"found": found, "seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime}
    from shardlab.core.host import resident_memory

    print(json.dumps({**figures, "peak_mb": resident_memory().highest / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
