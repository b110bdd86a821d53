"""One rank's trace: its steps and passes, and what computed, moved and copied when.

Labels stand around the call that starts a collective, on the thread that makes it. NCCL's kernels
are traced back to that call by the correlation of their launch, messages to one other rank happen
inside of it. What gloo's worker threads run is not linked to its call: the i-th call of an
operation is matched to the i-th that runs. Two workers may begin two collectives in the other order
than they were called, then these two exchange their units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shardlab.profiling.events import (
    GLOO_OPERATIONS,
    ON_DEVICES,
    STEP,
    WORK,
    Events,
    operation_of,
)
from shardlab.profiling.intervals import (
    EMPTY,
    RESOLUTION_US,
    Intervals,
    covers,
    intersection,
    merge,
    times_of,
)
from shardlab.profiling.labels import BACKWARD, FORWARD, unit_of

EVER = np.array([[-np.inf, np.inf]])
_COLUMNS = ["start", "end", "launched", "name"]


@dataclass(frozen=True)
class Clues:
    """Events of one rank that tell its steps and passes; times on the CPU."""

    whole: Intervals = field(default_factory=lambda: EMPTY)
    """from the first event to the last"""
    engine: Intervals = field(default_factory=lambda: EMPTY)
    """nodes of the autograd engine"""
    optimizer: Mapping[str, Intervals] = field(default_factory=dict)
    """calls of `Optimizer.step`, by annotation"""
    aside: Intervals = field(default_factory=lambda: EMPTY)
    """neither pass: `zero_grad`, loading of batches"""
    host: Intervals = field(default_factory=lambda: EMPTY)
    """when operators of the thread that runs the steps computed"""
    calls: int = 0
    """of collectives, by c10d's operators"""
    launches: int = 0
    """of work on devices"""
    unlaunched: int = 0
    """kernels and copies without a launch in the trace"""
    earlier: int = 0
    """those of them that were launched before the trace began"""


@dataclass(frozen=True)
class Trace:
    """Trace of one rank; times are microseconds from the same origin on all ranks of a trace.

    Work is a table of start, end, launched (time of the launch by the CPU; of gloo's workers the
    time of the call; where the trace does not say, -inf if it was before the trace, otherwise the
    event's own start) and name (of a copy its direction); collectives have the unit, too, which is
    empty where the trace does not say.
    """

    steps: dict[int, Intervals]
    forward: Intervals
    """of all steps, on the CPU"""
    backward: Intervals
    kernels: pd.DataFrame
    """kernels except NCCL's"""
    copies: pd.DataFrame
    """copies to, from and on devices, fills included"""
    collectives: pd.DataFrame
    """communication between ranks, in the order of its start"""
    on_cpu: Intervals
    """when operators on the CPU computed, outside of gloo's threads"""
    on_device: bool
    """whether kernels compute; CPU operators then only launch them"""
    clues: Clues = field(default_factory=Clues)
    host_steps: dict[int, Intervals] | None = None
    """the steps on the CPU, if a device runs them later"""

    def near(self, window: Intervals) -> "Trace":
        """Return the trace with only the work that overlaps `window`."""
        first, last = window[0, 0], window[-1, 1]
        work = [events[(events["start"] < last) & (events["end"] > first)] for events in self.work]
        reached = (self.on_cpu[:, 0] < last) & (self.on_cpu[:, 1] > first)
        kernels, copies, collectives = work
        return replace(
            self,
            on_cpu=self.on_cpu[reached],
            kernels=kernels,
            copies=copies,
            collectives=collectives,
        )

    @property
    def work(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """All events on devices, and all collectives."""
        return self.kernels, self.copies, self.collectives

    def compute(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which anything computed."""
        times = merge(times_of(self.kernels)) if self.on_device else self.on_cpu
        return intersection(times, window)

    def communication(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which a collective ran."""
        return intersection(merge(times_of(self.collectives)), window)


def launched_during(work: pd.DataFrame, window: Intervals) -> Intervals:
    """Return the time of work that was launched within `window`."""
    return merge(times_of(work[covers(window, work["launched"].to_numpy())]))


def traces_of(events: Events, shift_us: float = 0.0) -> dict[int, Trace]:
    """Return the trace of each rank.

    Args:
        shift_us: is added to all times.
    """
    table = events.table
    table = table.assign(start=table["start"] + shift_us, end=table["end"] + shift_us)
    # of events that start together, the one that holds the others is first
    table = table.sort_values(["start", "end"], ascending=[True, False], kind="stable")

    def threads(rank: int, kind: str) -> list[str]:
        return [tid for (of, tid), this in events.threads.items() if (of, this) == (rank, kind)]

    return {
        rank: _trace(of_rank, threads(rank, "worker"), threads(rank, "engine"))
        for rank, of_rank in table.groupby("rank")
    }


def _trace(events: pd.DataFrame, workers: list[str], engine_threads: list[str]) -> Trace:
    roles = {str(role): of_role for role, of_role in events.groupby("role")}
    none = events[:0]
    on_cpu = events[~events["role"].isin(ON_DEVICES)]
    compute = {
        str(thread): computing(times_of(of_thread), of_thread["role"].to_numpy() == "compute")
        for thread, of_thread in on_cpu.groupby("thread")
    }
    work = _launched(events[events["role"].isin(WORK)], roles.get("launch", none))
    labels = roles.get("label", none)
    sent = _called(roles.get("collective", none), roles.get("call", none), workers)
    on_device = _named(work[work["role"] == "nccl"], roles.get("named", none))
    sent = pd.concat([sent, on_device]).sort_values("start", kind="stable")
    passes, steps = roles.get("pass", none), roles.get("step", none)
    numbers = steps["name"].str.removeprefix(STEP).astype(int)
    kernels = work[work["role"] == "kernel"]
    return Trace(
        steps={int(number): merge(times_of(of)) for number, of in steps.groupby(numbers)},
        forward=merge(times_of(passes[passes["name"] == FORWARD])),
        backward=merge(times_of(passes[passes["name"] == BACKWARD])),
        kernels=kernels[_COLUMNS],
        copies=work.loc[work["role"] == "copy", _COLUMNS],
        collectives=sent[_COLUMNS].assign(unit=_units(labels, sent)),
        on_device=len(kernels) > 0,
        on_cpu=merge(np.concatenate([EMPTY, *(t for i, t in compute.items() if i not in workers)])),
        clues=replace(
            _clues(roles, compute, workers, engine_threads),
            whole=np.array([[events["start"].min(), events["end"].max()]]),
            calls=len(roles.get("call", none)),
            launches=len(roles.get("launch", none)),
            unlaunched=int(work["caller"].isna().sum()),
            earlier=int(np.isneginf(work["launched"]).sum()),
        ),
    )


def computing(times: Intervals, computes: NDArray[np.bool_]) -> Intervals:
    """Return the time in which operators of a thread compute.

    An operator computes unless it holds one that launches or awaits a collective, a node of the
    autograd engine or a labelled range: such a wrapper lasts as long as what it waits for.

    Args:
        times: start and end of operators and labelled ranges, by start.
        computes: whether each of them is an operator that may compute.
    """
    operators, others = times[computes], times[~computes]
    # the first end among all that start at this one or later
    first_end = np.append(np.minimum.accumulate(others[::-1, 1])[::-1], np.inf)
    later = np.searchsorted(others[:, 0], operators[:, 0] - RESOLUTION_US)
    return merge(operators[first_end[later] > operators[:, 1] + RESOLUTION_US])


def _launched(work: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """Add time and thread of the launch of work on devices.

    A stream runs in the order of launches. So what ran on it without a known launch, before
    anything with one, was launched before the trace began.
    """
    known = launches.dropna(subset="correlation").drop_duplicates("correlation")
    known = known.set_index("correlation")
    launched = work["correlation"].map(known["start"]).astype(float)
    first = work["start"].where(launched.notna()).groupby(work["thread"]).transform("min")
    otherwise = work["start"].mask(work["start"] < first, -np.inf)
    caller = work["correlation"].map(known["thread"])
    return work.assign(launched=launched.fillna(otherwise), caller=caller)


def _called(sent: pd.DataFrame, calls: pd.DataFrame, workers: list[str]) -> pd.DataFrame:
    """Add time and thread of the call of collectives on the CPU: where they are not as many as the
    calls of their operation, they cannot be matched and have their own."""
    sent = sent.assign(launched=sent["start"], caller=sent["thread"])
    operations = calls["name"].map(GLOO_OPERATIONS)
    for operation, run in sent[sent["thread"].isin(workers)].groupby("name"):
        called = calls[operations == operation]
        if len(called) == len(run):
            sent.loc[run.index, "launched"] = called["start"].to_numpy()
            sent.loc[run.index, "caller"] = called["thread"].to_numpy()
    return sent


def _named(sent: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Name collectives whose record does not say which they are by the range around their launch:
    the kernel's own name may be that of another operation (SendRecv of an all-to-all)."""
    around = _innermost(ranges, sent[~sent["reported"].astype(bool)]).map(operation_of).dropna()
    library = sent.loc[around.index, "name"].str.split(":").str[0]
    named = sent["name"].copy()
    named[around.index] = library + ":" + around
    return sent.assign(name=named)


def _units(labels: pd.DataFrame, sent: pd.DataFrame) -> list[str]:
    """Return the unit of each collective: that of the innermost label around its call."""
    units = _innermost(labels, sent).map(unit_of)
    return [*units.reindex(sent.index, fill_value="")]


def _innermost(ranges: pd.DataFrame, called: pd.DataFrame) -> "pd.Series[str]":
    """Return the name of the innermost range around the call of each event, without those that
    have none."""
    by_thread = {str(thread): of_thread for thread, of_thread in ranges.groupby("thread")}
    names = {}
    for thread, of_caller in called.groupby("caller"):
        if thread in by_thread:
            outer = by_thread[str(thread)]["name"].tolist()
            start, end = times_of(by_thread[str(thread)]).T
            for index, time in of_caller["launched"].items():
                around = np.flatnonzero((start <= time + RESOLUTION_US) & (end >= time))
                if len(around):
                    names[index] = outer[around[-1]]
    return pd.Series([*names.values()], index=pd.Index(names, dtype=int), dtype=object)


def _clues(
    roles: Mapping[str, pd.DataFrame],
    compute: Mapping[str, Intervals],
    workers: list[str],
    engine_threads: list[str],
) -> Clues:
    def times(role: str) -> Intervals:
        return merge(times_of(roles[role])) if role in roles else EMPTY

    by_engine = [compute[tid] for tid in engine_threads if tid in compute]
    others = [times for tid, times in compute.items() if tid not in (*workers, *engine_threads)]
    # steps are run by the thread that annotates them, otherwise, as where ranges bear other numbers
    # than operators, by the busiest
    host = max(others, key=len, default=EMPTY)
    for role in ("optimizer", "step"):
        if role in roles and len(own := compute[roles[role]["thread"].iloc[0]]):
            host = own
    calls = roles["optimizer"].groupby("name") if "optimizer" in roles else ()
    return Clues(
        engine=times("engine") if "engine" in roles else merge(np.concatenate([EMPTY, *by_engine])),
        aside=times("aside"),
        optimizer={str(name): merge(times_of(of_name)) for name, of_name in calls},
        host=host,
    )
