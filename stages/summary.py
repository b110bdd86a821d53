"""Summary of what one command of Snakemake or DVC ran, read from the logs of its stages."""

import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import psutil

_LOGS = Path("logs")
_REPORT = Path("results/report/report.html")
_ENTRY = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) ", re.MULTILINE)
_DONE = re.compile(r"done in ([\d.]+) s")


def summarize(tool: int) -> str:
    """Return durations of stages, what crashed and errors of jobs since a tool was started, in
    lines.

    Durations are those that stages log: without Python's start and imports. A job that a signal
    ended is shown with what it said last; one that logged nothing is not shown.

    Args:
        tool: process id of Snakemake or DVC.
    """
    # logs have whole seconds
    since = datetime.fromtimestamp(int(psutil.Process(tool).create_time()))
    seconds: dict[str, list[float]] = defaultdict(list)
    crashed, failed = [], []
    for path in sorted(_LOGS.rglob("*.log")):
        job = " ".join(path.relative_to(_LOGS).with_suffix("").parts)
        stage = job.partition(" ")[0]
        entries = _entries(path, since)
        crashed += [entry for entry in entries if entry.startswith("crashed: ")]
        last = entries[-1].rpartition("\n")[2] if entries else ""
        if done := _DONE.fullmatch(last):
            seconds[stage].append(float(done[1]))
        elif last:
            error = last.removeprefix(f"{stage}: error: ")
            failed.append(f"failed: {job}: {error} (log: {path})")
    if not seconds and not failed:
        return ""
    ends = failed or [f"report: {_REPORT}"] * _REPORT.is_file()
    return "\n".join([*_table(seconds), *crashed, *ends])


def _entries(path: Path, since: datetime) -> list[str]:
    """Return the entries of a log that were written since then."""
    if datetime.fromtimestamp(path.stat().st_mtime) < since:
        return []
    _, *parts = _ENTRY.split(path.read_text(encoding="utf-8", errors="replace"))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [text.strip() for time, text in pairs if datetime.fromisoformat(time) >= since]


def _table(seconds: Mapping[str, list[float]]) -> list[str]:
    """Return a line for each stage, the longest first."""
    rows = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    rows.append(("all", [time for times in seconds.values() for time in times]))
    lines = [f"{name:10}{len(times):6}{sum(times):10.1f}" for name, times in rows]
    return [f"{'stage':10}{'jobs':>6}{'seconds':>10}", *lines] if seconds else []
