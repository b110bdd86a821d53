"""Seconds, CPU seconds and peak memory of calls in processes of their own.

It imports nothing that the measured call does not need, since imports are part of both.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

HEADINGS = ["seconds", "CPU seconds", "peak memory, MB"]


class Usage(NamedTuple):
    """Use of a process, and of the processes that it started."""

    seconds: float
    cpu_s: float
    peak_mb: float
    """of the largest process, the interpreter included"""

    def cells(self) -> list[str]:
        """Return the cells of `HEADINGS`."""
        from shardlab.core.numbers import figure

        return [figure(value) for value in self]


def fastest_usage(
    module: str, ways: Iterable[str], arguments: list[str], repetitions: int
) -> dict[str, Usage]:
    """Run `python -m MODULE --run WAY ARGUMENTS` in turns; return the fastest run of each way.

    A way whose package is not installed is left out.

    Raises:
        RuntimeError: a run has failed.
    """
    best: dict[str, Usage] = {}
    for way in [*ways] * repetitions:
        command = [sys.executable, "-m", module, "--run", way, *arguments]
        run = subprocess.run(command, capture_output=True, text=True)
        if "ModuleNotFoundError" in run.stderr:
            continue
        if run.returncode:
            raise RuntimeError(run.stderr)
        usage = Usage(**json.loads(run.stdout.splitlines()[-1]))
        best[way] = min(usage, best.get(way, usage))
    return best


def print_usage(call: Callable[[], object]) -> None:
    """Print the usage of this process with the call as JSON."""
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    from shardlab.core.host import resident_memory

    # ru_maxrss of a process itself begins with that of its parent, which has imported torch
    peak = max(resident_memory().highest, used[1].ru_maxrss * 1024)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    print(json.dumps(Usage(seconds, cpu, peak / 1e6)._asdict()))
