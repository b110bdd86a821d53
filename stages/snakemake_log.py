"""Display of a run of Snakemake: a bar on a terminal, a line for each job that ended, and errors.

Everything else is in the logs of the jobs. The Snakefile puts this handler in the place of
Snakemake's own. It is not a plugin: Snakemake finds plugins only as installed packages, so that
clones and images would need a second distribution.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent
from tqdm import tqdm

from stages.summary import DONE, ENTRY, LOGS, job_name

_LINES = 10
"""of the log of a job that failed"""
_TICK_S = 1.0
_UP_TO_DATE = "Nothing to be done"
_NOTHING_NEW = (
    "CalledProcessError",
    "Exiting because a job execution failed",
    "Assuming unrestricted shared filesystem",
)
"""messages of Snakemake that only repeat that a job failed, or that all is as usual"""
_SIGNAL = "died with <Signals"
"""in such an error where a signal ended the job, which its log does not tell"""
_WARNINGS = "warning: ", "crashed: "
"""of the entries of a job that ended, those that are shown"""
_UNTIMED = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}]"
_TIMED = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"


@dataclass
class Job:
    """A job that is about to run."""

    log: Path
    seconds: float | None = None
    """that it took before, or others of its stage did"""
    started: float | None = None
    before: tuple[int, ...] | None = None
    """state of the log at the start"""
    ended: bool = False
    failed: bool = False

    @property
    def runs(self) -> bool:
        """True from its start to its end."""
        return self.started is not None and not self.ended and not self.failed

    def start(self) -> None:
        """Remember the time and the state of the log."""
        self.failed = False  # a former attempt
        self.started = time.monotonic()
        self.before = self._state()

    def ran(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - (self.started or 0.0)

    def said(self) -> str:
        """Return the log, but nothing of a former job, whose log Snakemake removes."""
        state = self._state()
        if state in (None, self.before):
            return ""
        return self.log.read_text(encoding="utf-8", errors="replace").strip()

    def _state(self) -> tuple[int, ...] | None:
        if not self.log.exists():
            return None
        found = self.log.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


class JobLines(logging.Handler):
    """Handler of Snakemake's log.

    Args:
        plain: the handler that shows warnings and errors.
        executes: whether jobs are asked for; what `--lint` or `--unlock` say is shown as it is.
    """

    def __init__(self, plain: logging.Handler, executes: Callable[[], bool]) -> None:
        super().__init__()
        self._plain = plain
        self._executes = executes
        self._jobs: dict[int, Job] = {}
        self._bar: Any = None
        self._over = Event()
        self._repeated = ""
        """last line of the last error that only repeats that a job failed"""

    def begin(self, jobs: dict[int, Job]) -> None:
        """Show a bar of the jobs that are about to run, by their ids.

        It is by time where that of each is known, else by the number of jobs.
        """
        self._jobs = jobs
        self._timed = all(job.seconds is not None for job in jobs.values())
        self._bar = tqdm(
            total=sum(self._weight(job) for job in jobs.values()),
            bar_format=_TIMED if self._timed else _UNTIMED,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )
        if not self._bar.disable:
            Thread(target=self._tick, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Show what a user wants to know of a record."""
        match getattr(record, "event", None):
            case LogEvent.JOB_INFO if job := self._jobs.get(record.jobid):  # type: ignore[attr-defined]
                job.start()
            case LogEvent.JOB_FINISHED if job := self._jobs.get(record.job_id):  # type: ignore[attr-defined]
                self._end(job)
            case LogEvent.JOB_ERROR if job := self._jobs.get(record.jobid):  # type: ignore[attr-defined]
                self._fail(job, record)
            case LogEvent.JOB_ERROR | LogEvent.GROUP_ERROR:
                self._plain.handle(record)
            case None | LogEvent.ERROR if _repeats(record):
                if record.levelno >= logging.ERROR:
                    self._repeated = record.getMessage().strip().rpartition("\n")[2]
            case None | LogEvent.ERROR if _matters(record) or not self._executes():
                with tqdm.external_write_mode(sys.stderr):
                    self._plain.handle(record)

    def close(self) -> None:
        """Remove the bar."""
        self._over.set()
        if self._bar is not None:
            with self.lock:  # type: ignore[union-attr]
                self._bar.close()
        super().close()

    def _end(self, job: Job) -> None:
        job.ended = True
        entries = [text for _, text in ENTRY.findall(job.said())]
        if entries:  # `snakemake --touch` runs nothing
            results = [entry for entry in entries if not DONE.fullmatch(entry)]
            result = results.pop() if results else job_name(job.log)
            for entry in results:
                if any(word in entry for word in _WARNINGS):
                    _show(entry)
            ended = sum(each.ended for each in self._jobs.values())
            place = f"[{ended}/{len(self._jobs)}] " if self._bar.disable else ""
            _show(f"{place}{result}, {tqdm.format_interval(job.ran())}")
        self._draw()

    def _fail(self, job: Job, record: logging.LogRecord) -> None:
        """Show the end of the log; Snakemake reports some failures twice.

        Executors such as that of SLURM give a reason, and a log of their own.
        """
        if job.failed:
            return
        job.failed = True
        reason = getattr(record, "rule_msg", None)
        logs = ", ".join(map(str, getattr(record, "log", None) or [job.log]))
        _show(f"failed: {job_name(job.log)}, {tqdm.format_interval(job.ran())}; log: {logs}")
        lines = job.said().splitlines()[-_LINES:] or [self._repeated]
        for line in [*lines, *([str(reason)] if reason else ())]:
            _show(f"    {line}")
        self._draw()

    def _weight(self, job: Job) -> float:
        return job.seconds or 0.0 if self._timed else 1.0

    def _draw(self) -> None:
        jobs = self._jobs.values()
        running = [job for job in jobs if job.runs]
        self._bar.n = sum(self._weight(job) for job in jobs if job.ended)
        if self._timed:
            # nearly: one that takes longer than before is not over
            self._bar.n += sum(min(job.ran(), 0.95 * self._weight(job)) for job in running)
        names = ", ".join(job_name(job.log) for job in running)
        ended = sum(job.ended for job in jobs)
        failed = sum(job.failed for job in jobs)
        words = f"{ended} of {len(jobs)} jobs" + (f", {failed} failed" if failed else "")
        self._bar.set_description_str(words + (f", now {names}" if names else ""))

    def _tick(self) -> None:
        while not self._over.wait(_TICK_S):
            with self.lock:  # type: ignore[union-attr]
                self._draw()


def show_jobs(executes: Callable[[], bool]) -> JobLines | None:
    """Put the handler in the place of Snakemake's, unless a plugin of the user's is there."""
    for plain in logger.handlers:
        if plain.name == "DefaultStreamHandler":
            logger.removeHandler(plain)
            logger.addHandler(shown := JobLines(plain, executes))
            return shown
    return None


def _show(lines: str) -> None:
    tqdm.write(lines, file=sys.stderr)
    sys.stderr.flush()


def _repeats(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return any(words in message for words in _NOTHING_NEW) and _SIGNAL not in message


def _matters(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.getMessage().startswith(_UP_TO_DATE)


def recall(jobs: Iterable[Job]) -> None:
    """Fill in what jobs took before, by their logs."""
    took: dict[str, dict[Path, float]] = {}
    for path in LOGS.rglob("*.log"):
        if found := DONE.findall(path.read_text(encoding="utf-8", errors="replace")):
            took.setdefault(job_name(path).partition(" ")[0], {})[path] = float(found[-1])
    for job in jobs:
        stage = took.get(job_name(job.log).partition(" ")[0], {})
        job.seconds = stage.get(job.log, fmean(stage.values()) if stage else None)
