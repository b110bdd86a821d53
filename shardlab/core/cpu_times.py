"""CPU time of a rank, and of all processes on each CPU (proc_stat(5), proc_pid_stat(5)).

Read at the two ends of each part that is timed, in well under a millisecond. The time of interrupts
is left out: the kernel counts the run's own messages there, too.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY, _STOLEN = (1, 2, 3), 8
"""columns of a line of /proc/stat: user, nice and system; steal"""

CpuTimes = dict[str, Any]
"""of one rank: machine, cpus that it may run on; seconds, CPU seconds of the rank (own), and busy
and stolen seconds by CPU; plain values, so that they can be gathered"""


class CpuMeter:
    """Meter of CPU time from its creation on, in the process of a rank."""

    def __init__(self) -> None:
        self._begin = _read()

    def read(self) -> CpuTimes:
        """Return the times since the creation."""
        before, now = self._begin, _read()
        return {
            "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "cpus": sorted(os.sched_getaffinity(0)),
            **{key: now[key] - before[key] for key in ("seconds", "own")},
            **{
                key: {cpu: now[key][cpu] - before[key].get(cpu, 0.0) for cpu in now[key]}
                for key in ("busy", "stolen")
            },
        }


def total(times: Sequence[CpuTimes]) -> CpuTimes:
    """Return the sum of one rank's times over several parts of a run, one or more."""
    return {
        **times[-1],
        **{key: sum(each[key] for each in times) for key in ("seconds", "own")},
        **{
            key: {cpu: sum(each[key].get(cpu, 0.0) for each in times) for cpu in times[-1][key]}
            for key in ("busy", "stolen")
        },
    }


def _read() -> dict[str, Any]:
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    cpus = {line[0][3:]: line for line in lines if line[0][:3] == "cpu" and line[0] != "cpu"}
    return {
        "seconds": time.perf_counter(),
        "own": _own_seconds(),
        "busy": {cpu: sum(int(line[i]) for i in _BUSY) * _TICK_S for cpu, line in cpus.items()},
        "stolen": {cpu: int(line[_STOLEN]) * _TICK_S for cpu, line in cpus.items()},
    }


def _own_seconds() -> float:
    """Return the CPU time of this process and its descendants, ended ones included."""
    ended = os.times()
    below = sum(_seconds_of(child) for child in _children("self"))
    return time.process_time() + ended.children_user + ended.children_system + below


def _seconds_of(process: str) -> float:
    """Return the CPU time of a running process, its ended children and its descendants."""
    with suppress(OSError):  # it ended meanwhile
        # the name in parentheses may contain anything
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
        below = sum(_seconds_of(child) for child in _children(process))
        return sum(int(field) for field in fields[11:15]) * _TICK_S + below
    return 0.0


def _children(process: str) -> list[str]:
    found: list[str] = []
    for thread in Path("/proc", process, "task").iterdir():
        with suppress(OSError):  # it ended meanwhile, or the kernel was built without this file
            found += (thread / "children").read_text().split()
    return found
