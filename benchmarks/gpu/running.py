"""Run of parts, each a process with a time limit, some beside each other."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from benchmarks.gpu.parts import Part

_LONGEST_TEXT, _SHORTEST_S = 600, 8.0
_NO_TEST_RAN = re.compile(r"\d+ skipped\b.* in [\d.]+s")
"""last line of pytest, which begins with those that failed or passed where there are some"""


class PartOutcome(NamedTuple):
    """End of a part."""

    name: str
    verdict: str
    """PASS, FAIL, LATE: killed at its limit, or SKIP: no time was left, or no test of it ran"""
    seconds: float
    text: str
    """one line: what failed, or the last line of the output"""
    output: str = ""


class _Process:
    """A part that runs.

    Args:
        limit_s: after which it is killed.
    """

    def __init__(self, part: Part, limit_s: float) -> None:
        self._name, self._limit_s, self._start = part.name, limit_s, time.monotonic()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - until the end
        self._process = subprocess.Popen(
            [sys.executable, *part.arguments],
            env={**os.environ, **part.environment},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def outcome(self) -> PartOutcome | None:
        """Return how it ended, or None while it runs."""
        seconds, code = time.monotonic() - self._start, self._process.poll()
        if code is None and seconds < self._limit_s:
            return None
        self.kill()
        self._log.seek(0)
        output = self._log.read()
        verdict = "LATE" if code is None else "FAIL" if code else "PASS"
        if verdict == "PASS" and _NO_TEST_RAN.match(told(output)):
            verdict = "SKIP"
        return PartOutcome(self._name, verdict, seconds, told(output, verdict), output)

    def kill(self) -> None:
        """Kill it, and ranks and compilers that it has left."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_parts(
    parts: Sequence[Part], seconds: float, at_once: int, show: Callable[[PartOutcome], None]
) -> list[PartOutcome]:
    """Run parts in their order.

    Args:
        seconds: for all of them; what runs then is killed.
        at_once: how many run beside each other, but for those that run alone.
        show: called with each outcome as it comes.
    """
    end, waiting, outcomes = time.monotonic() + seconds, [*parts], list[PartOutcome]()
    running: list[_Process] = []
    try:
        while running or waiting:
            left = end - time.monotonic()
            while waiting and left > min(_SHORTEST_S, seconds / 2):
                if len(running) >= (1 if waiting[0].alone else at_once):
                    break
                part = waiting.pop(0)
                running.append(_Process(part, min(part.limit_s, left)))
            if not running:
                break
            time.sleep(0.05)
            for process in [*running]:
                if outcome := process.outcome():
                    running.remove(process)
                    outcomes.append(outcome)
                    show(outcome)
    finally:
        for process in running:
            process.kill()
    return outcomes + [PartOutcome(part.name, "SKIP", 0.0, "no time was left") for part in waiting]


def told(output: str, verdict: str = "") -> str:
    """Return the tests that failed, or that were all skipped, as pytest lists them, or else the
    last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    listed = ("SKIPPED ",) if verdict == "SKIP" else ("FAILED ", "ERROR ")
    reasons = [line for line in lines if line.startswith(listed)]
    return "; ".join(reasons or lines[-1:])[:_LONGEST_TEXT]
