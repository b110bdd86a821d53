"""Summary of what one command of Snakemake or DVC ran, read from the logs of its stages."""

import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import psutil

LOGS = Path("logs")
ENTRY = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (.*)", re.MULTILINE)
"""time and first line of an entry"""
DONE = re.compile(r"done in ([\d.]+) s")
"""last entry of a stage"""
_REPORT = Path("results/report/report.html")


def summarize(tool: int) -> str:
    """Return durations of stages, and what crashed, since a tool was started, in lines.

    Durations are those that stages log, with their imports.

    Args:
        tool: process id of Snakemake or DVC.
    """
    # logs have whole seconds
    since = datetime.fromtimestamp(int(psutil.Process(tool).create_time()))
    seconds: dict[str, list[float]] = defaultdict(list)
    crashed = []
    for path in sorted(LOGS.rglob("*.log")):
        entries = _entries(path, since)
        crashed += [entry for entry in entries if entry.startswith("crashed: ")]
        if entries and (done := DONE.fullmatch(entries[-1])):
            seconds[stage_name(path)].append(float(done[1]))
    if not seconds:
        return ""
    ends = [f"report: {_REPORT}"] * _REPORT.is_file()
    return "\n".join([*_table(seconds), *crashed, *ends])


def job_name(log: Path) -> str:
    """Return the stage of a log with its wildcards, such as `train fsdp2 0`."""
    return " ".join(log.relative_to(LOGS).with_suffix("").parts)


def stage_name(log: Path) -> str:
    """Return the stage of a log, such as `train`."""
    return log.relative_to(LOGS).with_suffix("").parts[0]


def _entries(path: Path, since: datetime) -> list[str]:
    """Return the first lines of the entries of a log that were written since then."""
    if datetime.fromtimestamp(path.stat().st_mtime) < since:
        return []
    entries = ENTRY.findall(read_log(path))
    return [text.strip() for time, text in entries if datetime.fromisoformat(time) >= since]


def read_log(path: Path) -> str:
    """Return the text of a log, to which programs of any encoding may have written."""
    return path.read_text(encoding="utf-8", errors="replace")


def _table(seconds: Mapping[str, list[float]]) -> list[str]:
    """Return a line for each stage, the longest first."""
    rows = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    rows.append(("all", [time for times in seconds.values() for time in times]))
    lines = [f"{name:10}{len(times):6}{sum(times):10.1f}" for name, times in rows]
    return [f"{'stage':10}{'jobs':>6}{'seconds':>10}", *lines]
