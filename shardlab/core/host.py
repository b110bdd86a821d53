"""The machine that a figure was measured on: its facts, its memory, and who used its CPUs."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import psutil

from shardlab.core.errors import UserError


def describe_host() -> dict[str, Any]:
    """Return processor, usable cores, GPUs, memory and Python version; the same keys on every
    machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def machine_key() -> str:
    """Return a key of processes that see one /dev/shm: containers separate those of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/dev/shm').stat().st_dev}"


def memory_bytes() -> int:
    """Return the host memory in bytes: of the machine, or the lowest control group limit."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _memory_of_groups())])


def free_memory_bytes() -> int:
    """Return the bytes that this process and its children can still allocate.

    Files that the kernel keeps in memory only to save time count as free.
    """
    available: int = psutil.virtual_memory().available
    return min([available, *(limit - used for limit, used in _memory_of_groups())])


def _memory_of_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and usage of the control groups that have a limit (cgroups(7), v1 and v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in _GROUP_FILES:
            continue
        root = Path("/sys/fs/cgroup", controllers)
        limit, usage, prefix = _GROUP_FILES[controllers]
        inner = root / name.removeprefix("/")
        # a container sees its own group as the root, whatever its name outside
        for group in (root, inner, *inner.parents):
            with suppress(OSError, ValueError):  # no such group here, or "max"
                most = int((group / limit).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                fields = {key: int(value) for key, value in map(str.split, lines)}
                cached = fields[f"{prefix}inactive_file"] + fields[f"{prefix}active_file"]
                yield most, int((group / usage).read_text()) - cached


_GROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""limit file, usage file and prefix of memory.stat fields, by the controllers of a line"""


class ResidentMemory(NamedTuple):
    """Resident set of this process, in bytes."""

    now: int
    highest: int
    """peak so far"""
    of_files: int
    """of libraries and other mapped files, now"""


def resident_memory() -> ResidentMemory:
    """Read /proc/self/status (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return ResidentMemory(
        *(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile"))
    )


_WRITTEN_BY_THE_PIPELINE = (":!results", ":!dvc.lock", ":(top,exclude)experiments")


def git_revision() -> str:
    """Return the commit of the working tree; `unknown` outside of git.

    With `+` when a tracked file has changes, other than what the pipeline itself writes.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_WRITTEN_BY_THE_PIPELINE)
    return f"{commit}{'+' if changed else ''}" if commit else "unknown"


def _git(*arguments: str) -> str:
    """Return the output of git; empty without git or a repository."""
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of the GPUs that NVIDIA's driver lists; CUDA stays untouched."""
    lines = [
        line
        for path in sorted(root.glob("*/information"))
        for line in path.read_text().splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def torch_version() -> str:
    """Return `torch.__version__`, which names the build, without the seconds of an import.

    Raises:
        UserError: there is no torch.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise UserError("no torch here: run make")
    # the metadata of PyPI's packages lacks the build
    return str(run_path(str(Path(torch.origin).with_name("version.py")))["__version__"])


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


CpuTimes = dict[str, Any]
"""of one rank: machine, cpus that it may run on; seconds, CPU seconds of the rank (own), and busy
and stolen seconds by CPU; plain values, so that they can be gathered"""


class CpuMeter:
    """Meter of CPU time from its creation on, of this process and of all on each CPU.

    The time of interrupts is left out: the kernel counts the run's own messages there, too.
    """

    def __init__(self) -> None:
        self._begin = _cpu_times()

    def read(self) -> CpuTimes:
        """Return the times since the creation."""
        before, now = self._begin, _cpu_times()
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
        **{key: sum(part[key] for part in times) for key in ("seconds", "own")},
        **{
            key: {cpu: sum(part[key].get(cpu, 0.0) for part in times) for cpu in times[-1][key]}
            for key in ("busy", "stolen")
        },
    }


def _cpu_times() -> dict[str, Any]:
    cpus = {str(i): times for i, times in enumerate(psutil.cpu_times(percpu=True))}
    return {
        "seconds": time.perf_counter(),
        "own": _own_seconds(),
        "busy": {cpu: times.user + times.nice + times.system for cpu, times in cpus.items()},
        "stolen": {cpu: times.steal for cpu, times in cpus.items()},
    }


def _own_seconds() -> float:
    """Return the CPU time of this process and its descendants, ended ones included."""
    me, seconds = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            seconds += sum(process.cpu_times()[:4])
    return seconds
