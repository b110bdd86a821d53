"""Discrete-event simulation of one step on one rank: tasks in lanes that share a CPU and a link.

All ranks do the same in the same order, so one stands for all. A lane is a thread or a stream: it
runs its tasks one after another, in the order of the list. What runs at the same time in
several lanes shares the processor and the link in equal parts, as threads and TCP streams do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.config.calibration_record import Operation

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
    queues: dict[str, list[Task]] = {}
    """tasks by lane, the next one last"""
    for task in reversed(tasks):
        queues.setdefault(task.lane, []).append(task)
    places = {lane: place for place, lane in enumerate(queues)}
    watching: dict[str, list[str]] = {}
    """lanes whose next task waits for a task, by the name of that one"""
    idle, running = [*queues], list[_Running]()
    spans: dict[str, Span] = {}
    now, link = 0.0, _Link(rank)
    while len(spans) < len(tasks):
        for lane in idle:
            queue = queues[lane]
            for name in queue[-1].after if queue else ():
                if name not in spans:
                    watching.setdefault(name, []).append(lane)
                    break
            else:
                running += [_Running(queue.pop(), now)] if queue else []
        idle = []
        assert running, "tasks wait for each other"
        if len(running) == 1:  # nothing else starts before it ends
            now += running[0].finish(rank, link)
            ended, running = running, []
        else:
            ended = [each for each in running if each.needs_nothing() and not each.proceed(link)]
            running = [each for each in running if each not in ended] if ended else running
        if not ended:
            now += _advance(running, rank, link)
            continue
        for each in ended:
            spans[each.task.name] = Span(each.start, now)
            idle += [each.task.lane, *watching.pop(each.task.name, ())]
        idle.sort(key=places.__getitem__)  # lanes that start at once share the link in one order
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

    __slots__ = ("_phases", "_wait_then", "cpu", "nbytes", "start", "task", "wait")

    def __init__(self, task: Task, start: float) -> None:
        self.task, self.start = task, start
        self._phases = iter(task.phases)
        self.cpu = self.nbytes = self.wait = 0.0
        self._wait_then = 0.0

    def needs_nothing(self) -> bool:
        """Return whether the present need is met."""
        return self.cpu <= _DONE and self.nbytes <= _DONE and self.wait <= _DONE

    def proceed(self, link: _Link) -> bool:
        """Go on to the next need; return whether there is one."""
        while self.needs_nothing():
            if self._wait_then > _DONE:
                self.wait, self._wait_then = self._wait_then, 0.0
                return True
            phase = next(self._phases, None)
            if phase is None:
                return False
            self.cpu, self._wait_then = phase.cpu, phase.wait
            self.nbytes = link.pass_at_once(phase.nbytes) if phase.nbytes else 0.0
        return True

    def finish(self, rank: Rank, link: _Link) -> float:
        """Advance to the end of the task, which runs alone; return the seconds until then."""
        seconds, speed = 0.0, min(1.0, rank.processors)
        while self.proceed(link):
            sending = self.nbytes / rank.bytes_per_second
            busy = max(self.cpu / speed, sending)
            seconds += busy + self.wait
            link.rest(busy - sending + self.wait)
            self.cpu = self.nbytes = self.wait = 0.0
        return seconds


def _advance(running: Sequence[_Running], rank: Rank, link: _Link) -> float:
    """Advance to the next end of a need of any task; return the seconds until then."""
    computing = sending = 0
    for each in running:
        computing += each.cpu > _DONE
        sending += each.nbytes > _DONE
    computed = min(1.0, rank.processors / computing) if computing else 0.0
    sent = rank.bytes_per_second / sending if sending else 0.0
    seconds = float("inf")
    for each in running:
        if each.cpu > _DONE:
            seconds = min(seconds, each.cpu / computed)
        if each.nbytes > _DONE:
            seconds = min(seconds, each.nbytes / sent)
        if each.wait > _DONE:
            seconds = min(seconds, each.wait)
    for each in running:
        if each.cpu > _DONE:
            each.cpu -= seconds * computed
        if each.nbytes > _DONE:
            each.nbytes = 0.0 if sent == float("inf") else each.nbytes - seconds * sent
        if each.wait > _DONE:
            each.wait -= seconds
    if not sending:
        link.rest(seconds)
    return seconds
