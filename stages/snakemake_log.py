"""Display of a run of Snakemake: a bar on a terminal, a line for each job that ended, and errors.

Everything else is in the logs of the jobs. The Snakefile puts this handler in the place of
Snakemake's own. It is not a logger plugin: Snakemake looks for plugins before it reads the
Snakefile, so a copy of this tree would run the plugin of another one, or stop where none is
installed. A plugin for the terminal would also have to print whatever a dry run prints.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any, Literal

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent
from tqdm import tqdm

from stages.summary import DONE, ENTRY, LOGS, job_name, read_log, stage_name

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
    """Job that is about to run."""

    log: Path
    seconds: float | None = None
    """Duration of its last run, or else the mean of its stage."""
    state: Literal["waits", "runs", "ended", "failed"] = "waits"
    started: float = 0.0
    before: int = 0
    """Time of the last change of the log, at the start."""

    def start(self) -> None:
        """Begin to count its seconds."""
        self.state, self.started, self.before = "runs", time.monotonic(), self.written()

    def ran(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    def written(self) -> int:
        """Return the time of the last change of the log, in nanoseconds; 0 without one."""
        return self.log.stat().st_mtime_ns if self.log.exists() else 0


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
        job.state = "ended"
        if job.written() not in (0, job.before):  # `--touch` runs nothing
            entries = [text for _, text in ENTRY.findall(read_log(job.log))]
            results = [entry for entry in entries if not DONE.fullmatch(entry)]
            result = results.pop() if results else job_name(job.log)
            for entry in results:
                if any(word in entry for word in _WARNINGS):
                    _show(entry)
            place = f"[{len(self._in('ended'))}/{len(self._jobs)}] " if self._bar.disable else ""
            _show(f"{place}{result}, {tqdm.format_interval(job.ran())}")
        self._draw()

    def _fail(self, job: Job, record: logging.LogRecord) -> None:
        """Show the end of the log, once: Snakemake reports some failures twice.

        The executor of SLURM gives a reason, and a log of its own.
        """
        if job.state == "failed":
            return
        job.state = "failed"
        reason = getattr(record, "rule_msg", None)
        logs = ", ".join(map(str, getattr(record, "log", None) or [job.log]))
        _show(f"failed: {job_name(job.log)}, {tqdm.format_interval(job.ran())}; log: {logs}")
        # Snakemake removes the log of an earlier run before a job begins
        lines = read_log(job.log).splitlines()[-_LINES:] if job.written() else []
        for line in [*(lines or [self._repeated]), *([str(reason)] if reason else ())]:
            _show(f"    {line}")
        self._draw()

    def _weight(self, job: Job) -> float:
        return job.seconds or 0.0 if self._timed else 1.0

    def _in(self, state: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.state == state]

    def _draw(self) -> None:
        running, ended, failed = self._in("runs"), self._in("ended"), self._in("failed")
        self._bar.n = sum(map(self._weight, ended))
        if self._timed:
            # a job that takes longer than before has not ended
            self._bar.n += sum(min(job.ran(), 0.95 * self._weight(job)) for job in running)
        names = ", ".join(job_name(job.log) for job in running)
        text = f"{len(ended)} of {len(self._jobs)} jobs" + f", {len(failed)} failed" * bool(failed)
        self._bar.set_description_str(text + f", now {names}" * bool(running))

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
    stages: dict[str, dict[Path, float]] = {}
    for path in LOGS.rglob("*.log"):
        if seconds := DONE.findall(read_log(path)):
            stages.setdefault(stage_name(path), {})[path] = float(seconds[-1])
    for job in jobs:
        took = stages.get(stage_name(job.log), {})
        job.seconds = took.get(job.log, fmean(took.values()) if took else None)
