"""Summary of what one command of Snakemake or DVC ran, read from the logs of its stages."""

import re
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

_LOGS = Path("logs")
_REPORT = Path("results/report/report.html")
_ENTRY = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) ", re.MULTILINE)
_DONE = re.compile(r"done in ([\d.]+) s")


class _Ended(NamedTuple):
    job: str
    """stage and the values of its arguments"""
    log: Path
    seconds: float | None
    """None: it failed"""
    said: str
    """the last line of its log"""

    def __str__(self) -> str:
        stage = self.job.partition(" ")[0]
        error = self.said.removeprefix(f"{stage}: error: ")
        return f"failed: {self.job}: {error} (log: {self.log})"


def summarize(tool: int) -> str:
    """Return durations of stages and errors of jobs since a tool was started, in lines.

    Durations are those that stages log: without Python's start and imports. A job that a signal
    ended is shown with what it said last; one that logged nothing is not shown.

    Args:
        tool: process id of Snakemake or DVC.
    """
    # logs have whole seconds
    since = datetime.fromtimestamp(int(psutil.Process(tool).create_time()))
    ended = [job for path in sorted(_LOGS.rglob("*.log")) if (job := _read(path, since))]
    if not ended:
        return ""
    failed = [str(job) for job in ended if job.seconds is None]
    lines = _table([job for job in ended if job.seconds is not None])
    return "\n".join([*lines, *(failed or [f"report: {_REPORT}"] * _REPORT.is_file())])


def _read(path: Path, since: datetime) -> _Ended | None:
    """Return the job that wrote the last entry of a log; None if it did so before."""
    if datetime.fromtimestamp(path.stat().st_mtime) < since:
        return None
    *_, time, text = ["", *_ENTRY.split(path.read_text(encoding="utf-8", errors="replace"))]
    if not time or datetime.fromisoformat(time) < since:
        return None
    last = text.strip().rpartition("\n")[2]
    done = _DONE.fullmatch(last)
    job = " ".join(path.relative_to(_LOGS).with_suffix("").parts)
    return _Ended(job, path, float(done[1]) if done else None, last)


def _table(jobs: list[_Ended]) -> list[str]:
    """Return a line for each stage, the longest first."""
    if not jobs:
        return []
    stages: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        stages[job.job.partition(" ")[0]].append(job.seconds or 0.0)
    rows = sorted(stages.items(), key=lambda item: -sum(item[1]))
    rows = [*rows, ("all", [second for seconds in stages.values() for second in seconds])]
    lines = [f"{name:10}{len(seconds):6}{sum(seconds):10.1f}" for name, seconds in rows]
    return [f"{'stage':10}{'jobs':>6}{'seconds':>10}", *lines]
