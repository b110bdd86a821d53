"""Display of a run of Snakemake: a bar, a line per job that ended, and what failed, once."""

import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from stages.snakemake_log import Job, JobLines, recall

TIME = "2026-11-27T12:00:00"
LOGS = [Path("logs/train/fsdp2/0.log"), Path("logs/report.log")]
Say = Callable[..., None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[io.StringIO, Terminal], ids=["pipe", "terminal"])
def shown(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> io.StringIO:
    """Stderr, in a folder of its own."""
    stream: io.StringIO = request.param()
    monkeypatch.chdir(tmp_path)
    return stream


def write(path: Path, *entries: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.writelines(f"{entry}\n" for entry in entries)


def started(shown: io.StringIO, patch: pytest.MonkeyPatch) -> tuple[JobLines, Say]:
    """A run of both jobs, and a function that makes records of it."""
    patch.setattr(sys, "stderr", shown)
    lines = JobLines(logging.StreamHandler(shown), lambda: True)
    jobs = {number: Job(path) for number, path in enumerate(LOGS)}
    recall(jobs.values())
    lines.begin(jobs)

    def say(message: str, level: int = logging.INFO, **extra: object) -> None:
        record = logging.LogRecord("snakemake", level, "", 0, message, None, None)
        vars(record).update(extra)
        lines.handle(record)

    return lines, say


def text(shown: io.StringIO) -> list[str]:
    """The lines that stay on the screen."""
    said = re.sub(r"\x1b\[[A-Z]", "", shown.getvalue())
    screen = [line.rpartition("\r")[2] for line in said.split("\n")]
    return [line for line in screen if line.strip() and "|" not in line]


def test_a_job_that_ended_is_one_line_with_its_result(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(LOGS[0], f"{TIME} train fsdp2 seed 0: of before")
    lines, say = started(shown, monkeypatch)
    say("Select jobs to execute...")
    say("Rule: train", event=LogEvent.JOB_INFO, jobid=0)
    LOGS[0].unlink()  # by Snakemake
    results = (
        "link: emulated",
        "warning: slow",
        "train fsdp2 seed 0: 41.2 ms/step, loss 4.31",
        "done in 3.0 s",
    )
    write(LOGS[0], *(f"{TIME} {entry}" for entry in results), "UserWarning: of some package")
    say("Finished", event=LogEvent.JOB_FINISHED, job_id=0)
    say("Rule: report", event=LogEvent.JOB_INFO, jobid=1)
    write(LOGS[1], f"{TIME} done in 1.0 s")
    say("Finished", event=LogEvent.JOB_FINISHED, job_id=1)
    say("Finished", event=LogEvent.JOB_FINISHED, job_id=2)  # `all`
    lines.close()
    said = [re.sub(r"\d\d:\d\d$", "TIME", line) for line in text(shown)]
    expected = ["train fsdp2 seed 0: 41.2 ms/step, loss 4.31, TIME", "report, TIME"]
    if not shown.isatty():
        expected = [f"[{number}/2] {line}" for number, line in enumerate(expected, 1)]
        assert "\r" not in shown.getvalue()
    assert said == ["warning: slow", *expected]


def test_a_failure_is_shown_once_with_the_end_of_its_log(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(LOGS[0], "of before")
    lines, say = started(shown, monkeypatch)
    say("Rule: train", event=LogEvent.JOB_INFO, jobid=0)
    LOGS[0].unlink()
    write(LOGS[0], *(f"line {number}" for number in range(50)), "ValueError: x")
    code = "RuleException:\nCalledProcessError in file train.smk, line 40:\nCommand ..."
    say(code, logging.ERROR, event=LogEvent.ERROR)
    say("Error in rule train", logging.ERROR, event=LogEvent.JOB_ERROR, jobid=0)
    say("Error in rule train", logging.ERROR, event=LogEvent.JOB_ERROR, jobid=0)
    say("the disk is nearly full", logging.WARNING)
    say("no rule makes this", logging.ERROR, event=LogEvent.ERROR)
    say("Exiting because a job execution failed. Look above", logging.ERROR)
    lines.close()
    first, *end, warning, error = text(shown)
    assert re.fullmatch(r"failed: train fsdp2 0, \d\d:\d\d; log: logs/train/fsdp2/0\.log", first)
    assert end == [*(f"    line {number}" for number in range(41, 50)), "    ValueError: x"]
    assert (warning, error) == ("the disk is nearly full", "no rule makes this")


def test_what_ended_a_job_is_shown_where_its_log_does_not_tell(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, say = started(shown, monkeypatch)
    say("Assuming unrestricted shared filesystem usage.")
    say("Rule: train", event=LogEvent.JOB_INFO, jobid=0)
    killed = (
        "CalledProcessError in file train.smk, line 40:\nCommand died with <Signals.SIGKILL: 9>"
    )
    say(killed, logging.ERROR, event=LogEvent.ERROR)
    reason = "SLURM status is: 'OUT_OF_MEMORY'"
    logs = ["logs/train/fsdp2/0.log", "slurm/7.log"]
    error = {"event": LogEvent.JOB_ERROR, "jobid": 0, "rule_msg": reason, "log": logs}
    say("Error in rule train", logging.ERROR, **error)
    lines.close()
    *signal, failed, shown_reason = text(shown)
    assert "died with <Signals.SIGKILL: 9>" in signal[-1]
    assert failed.endswith("log: logs/train/fsdp2/0.log, slurm/7.log")
    assert shown_reason == f"    {reason}"


def test_a_job_of_which_only_files_are_touched_is_no_line(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(LOGS[0], f"{TIME} train fsdp2 seed 0: of before", f"{TIME} done in 3.0 s")
    lines, say = started(shown, monkeypatch)
    say("Rule: train", event=LogEvent.JOB_INFO, jobid=0)
    say("Finished", event=LogEvent.JOB_FINISHED, job_id=0)
    lines.close()
    assert text(shown) == []


@pytest.mark.parametrize("shown", [Terminal], indirect=True)
@pytest.mark.parametrize(
    "earlier, share",
    [
        ({}, "50%"),
        ({"train/fsdp2/0": 30, "report": 10}, "75%"),
        ({"train/fsdp2/0": 30}, "50%"),
        ({"train/fsdp2/0": 30, "train/ddp/0": 99, "report": 10}, "75%"),
        ({"train/ddp/0": 20, "train/ddp/1": 70, "report": 5}, "90%"),
    ],
    ids=["by number", "by time", "one stage is not known", "its own time", "the mean of its stage"],
)
def test_the_bar_is_by_time_where_all_stages_are_known(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch, earlier: dict[str, float], share: str
) -> None:
    for name, seconds in earlier.items():
        write(Path("logs", f"{name}.log"), f"{TIME} done in {seconds:.1f} s")
    lines, say = started(shown, monkeypatch)
    say("Rule: train", event=LogEvent.JOB_INFO, jobid=0)
    say("Finished", event=LogEvent.JOB_FINISHED, job_id=0)
    lines.close()
    bars = [drawn for drawn in shown.getvalue().split("\r") if "1 of 2 jobs" in drawn]
    assert bars[-1].split("|")[0].strip() == share
