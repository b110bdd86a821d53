"""Description of this machine, its memory, and the use of its CPUs."""

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
    """Return processor, usable cores, GPUs, memory, kernel and Python version of this machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def machine_key() -> str:
    """Return a key that is equal for processes with the same /dev/shm.

    Processes in different containers of one machine have different keys.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/dev/shm').stat().st_dev}"


def memory_bytes() -> int:
    """Return the host memory in bytes, or the lowest limit of a control group if it is lower."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _memory_of_groups())])


def free_memory_bytes() -> int:
    """Return the bytes that this process and its children can still allocate.

    The kernel's cache of files counts as free.
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
                limit_bytes = int((group / limit).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                fields = {key: int(value) for key, value in map(str.split, lines)}
                cached = fields[f"{prefix}inactive_file"] + fields[f"{prefix}active_file"]
                yield limit_bytes, int((group / usage).read_text()) - cached


_GROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""Limit file, usage file and prefix of memory.stat fields, by the controllers of a line."""


class ResidentMemory(NamedTuple):
    """Resident set of this process, in bytes."""

    now: int
    highest: int
    """Peak of the process."""
    of_files: int
    """Current part of libraries and other mapped files."""


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

    A `+` follows it if a tracked file has changes that the pipeline did not write.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_WRITTEN_BY_THE_PIPELINE)
    return f"{commit}{'+' if changed else ''}" if commit else "unknown"


def _git(*arguments: str) -> str:
    """Return the output of git, or an empty text without git or a repository."""
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of the GPUs that NVIDIA's driver lists, without initializing CUDA."""
    lines = [
        line
        for path in sorted(root.glob("*/information"))
        for line in path.read_text().splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def torch_version() -> str:
    """Return `torch.__version__`, which names the build, without importing torch.

    Raises:
        UserError: torch is not installed.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise UserError("no torch here: run make")
    # not from the metadata of the package, which lacks the build
    return str(run_path(str(Path(torch.origin).with_name("version.py")))["__version__"])


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


CpuTimes = dict[str, Any]
"""CPU times of one rank: its machine, the CPUs that it may use, elapsed seconds, CPU seconds of the
rank (own), and busy and stolen seconds of each CPU. Plain values, so that they can be gathered."""


class CpuMeter:
    """Meter of CPU time since its creation, of this process and of each CPU.

    The time of interrupts is left out, since it includes the messages of this run.
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
    """Return the sum of one rank's times over one or more parts of a run."""
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
    """Return the CPU time of this process and its descendants, also of those that have ended."""
    current, seconds = psutil.Process(), 0.0
    for process in (current, *current.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it may end while this loop runs
            seconds += sum(process.cpu_times()[:4])
    return seconds
