"""Discrete-event simulation of one step on one rank: tasks in lanes that share a CPU and a link.

All ranks do the same in the same order, so one stands for all. A lane is a thread or a stream: it
runs its tasks one after another, in the order of the list. What runs at the same time in
several lanes shares the processor and the link in equal parts, as threads and TCP streams do.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardlab.measurements.calibration import Operation

_DONE = 1e-12
"""seconds or bytes that are rounding error"""


class Phase(NamedTuple):
    """Part of a task that computes and sends concurrently, then waits."""

    cpu: float = 0.0
    """CPU seconds"""
    nbytes: float = 0.0
    """bytes through the link"""
    wait: float = 0.0
    """seconds of fixed latency afterwards: the delay of a link, threads of other ranks"""
    operation: Operation | None = None
    """the operation, for communication"""
    vector_bytes: float = 0.0
    """bytes of the whole vector of all ranks, for communication"""


class Task(NamedTuple):
    """Phases that run one after another in a lane."""

    name: str
    """unique name"""
    lane: str
    phases: tuple[Phase, ...]
    after: tuple[str, ...] = ()
    """names of earlier tasks that this one waits for"""


class Rank(NamedTuple):
    """Resources of one rank."""

    processors: float = 1.0
    """cores of this rank, possibly fractional; no phase uses more than one"""
    bytes_per_second: float = float("inf")
    """rate of the link"""
    bucket_bytes: float = 0.0
    """burst bytes that pass at once after a pause, as in a token bucket (tc-tbf(8)); full at first
    """


class Span(NamedTuple):
    """Start and end of a task, in seconds from the beginning of the step."""

    start: float
    end: float


def simulate(tasks: Sequence[Task], rank: Rank) -> dict[str, Span]:
    """Simulate the tasks; return start and end of each by name, in the order of their ends.

    Between two events, the end of a need or of a phase, every rate is constant, so the simulation
    is exact up to rounding.
    """
    waiting: dict[str, list[Task]] = {}
    for task in reversed(tasks):
        waiting.setdefault(task.lane, []).append(task)
    running: dict[str, _Running] = {}
    spans: dict[str, Span] = {}
    now, link = 0.0, _Link(rank)
    while waiting or running:
        for lane in [lane for lane in waiting if lane not in running]:
            if all(name in spans for name in waiting[lane][-1].after):
                running[lane] = _Running(waiting[lane].pop(), now)
                if not waiting[lane]:
                    del waiting[lane]
        assert running, "tasks wait for each other"
        ended = [lane for lane, each in running.items() if each.ended(link)]
        for lane in ended:
            each = running.pop(lane)
            spans[each.task.name] = Span(each.start, now)
        if not ended:
            now += _advance(running.values(), rank, link)
    return spans


def duration(spans: dict[str, Span]) -> float:
    """Return the seconds of the whole step."""
    return max((span.end for span in spans.values()), default=0.0)


class _Link:
    """Token bucket: bytes that may pass at once."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._tokens = rank.bucket_bytes

    def pass_at_once(self, nbytes: float) -> float:
        """Take as many bytes as the bucket has; return the rest."""
        passed = min(self._tokens, nbytes)
        self._tokens -= passed
        return nbytes - passed

    def rest(self, seconds: float) -> None:
        """Refill the bucket after so many idle seconds."""
        if self._rank.bucket_bytes:
            gained = seconds * self._rank.bytes_per_second
            self._tokens = min(self._rank.bucket_bytes, self._tokens + gained)


class _Running:
    """A running task and what its present phase still needs."""

    def __init__(self, task: Task, start: float) -> None:
        self.task, self.start = task, start
        self._phases = list(reversed(task.phases))
        self.cpu = self.nbytes = self.wait = 0.0
        self._wait_then = 0.0

    def ended(self, link: _Link) -> bool:
        """Advance to the next need; return whether none is left."""
        while max(self.cpu, self.nbytes, self.wait) <= _DONE:
            if self._wait_then > _DONE:
                self.wait, self._wait_then = self._wait_then, 0.0
            elif self._phases:
                phase = self._phases.pop()
                self.cpu, self._wait_then = phase.cpu, phase.wait
                self.nbytes = link.pass_at_once(phase.nbytes)
            else:
                return True
        return False


def _advance(running: Iterable[_Running], rank: Rank, link: _Link) -> float:
    """Advance to the next end of a need of any task; return the seconds until then."""
    computing = [each for each in running if each.cpu > _DONE]
    sending = [each for each in running if each.nbytes > _DONE]
    pausing = [each for each in running if each.wait > _DONE]
    computed = min(1.0, rank.processors / len(computing)) if computing else 0.0
    sent = rank.bytes_per_second / len(sending) if sending else 0.0
    times = [
        *(each.cpu / computed for each in computing),
        *(each.nbytes / sent for each in sending),
        *(each.wait for each in pausing),
    ]
    seconds = min(times, default=0.0)
    for each in computing:
        each.cpu -= seconds * computed
    for each in sending:
        each.nbytes = 0.0 if sent == float("inf") else each.nbytes - seconds * sent
    for each in pausing:
        each.wait -= seconds
    if not sending:
        link.rest(seconds)
    return seconds
