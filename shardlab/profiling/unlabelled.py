"""Steps and passes of a trace without labels.

* steps: `ProfilerStep#N`. Without these, every call of `Optimizer.step` ends a step, or else every
  backward pass does, or else the trace is one step. A device runs later than the CPU: there a step
  begins when the work of the previous steps has ended.
* backward: nodes of the autograd engine, until the thread that runs the steps computes something
  else. Where a pass started collectives that run on the CPU, it includes the wait for them after
  its last node, in which DDP waits: it ends with the next event of that thread.
* forward: from the first operator after the previous backward pass and the previous call of
  `Optimizer.step` to the backward pass, without `zero_grad` and the loading of batches.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.intervals import (
    EMPTY,
    RESOLUTION_US,
    Intervals,
    difference,
    intersection,
    merge,
)
from shardlab.profiling.trace import Clues, Trace

Steps = dict[int, Intervals]


def infer(trace: Trace) -> tuple[Trace, list[str]]:
    """Return the trace with steps and passes, and notes on what was inferred or is unknown.

    Steps and passes with labels stay as they are.
    """
    labelled = len(trace.backward) > 0
    outside = _outside(trace.clues)
    backward = trace.backward if labelled else _backward(trace.clues, outside)
    steps, notes = _steps(trace, backward)
    if not labelled:
        backward = _with_waits(trace, outside, steps, backward)
        forward = _forward(trace.clues, outside, steps, backward)
        trace = replace(trace, forward=forward, backward=backward)
    notes += _notes_on_passes(trace, labelled)
    complete = _complete(trace, steps)
    if complete.keys() < steps.keys():
        fragments = ", ".join(str(number) for number in steps if number not in complete)
        notes.append(
            f"steps: {len(steps) - len(complete)} of {len(steps)} left out: they have no backward "
            f"pass, as at the begin or the end of a trace: {fragments}"
        )
    if trace.on_device:
        trace, steps = replace(trace, host_steps=complete), _on_device(trace, steps)
        missing = [str(number) for number in complete if number not in steps]
        if missing:
            notes.append(
                f"steps: {len(missing)} of {len(complete)} left out: the device did none of their "
                f"work in the trace: {', '.join(missing)}"
            )
        complete = {number: step for number, step in steps.items() if number in complete}
    updates = merge(np.concatenate([EMPTY, *trace.clues.optimizer.values()]))
    on_cpu = trace.host_steps or complete
    updated = sum(len(intersection(updates, on_cpu[number])) > 0 for number in complete)
    if 0 < updated < len(complete):
        notes.append(f"optimizer: in {updated} of {len(complete)} steps: their mean is shown")
    return replace(trace, steps=complete), [*notes, *_missing(trace)]


def _complete(trace: Trace, steps: Steps) -> Steps:
    """Return the steps with a backward pass; all steps, where none has one."""
    complete = {n: step for n, step in steps.items() if len(intersection(trace.backward, step))}
    return complete or steps


def _outside(clues: Clues) -> Intervals:
    """Return when the thread that runs the steps computes outside of the autograd engine."""
    outside = difference(clues.host, clues.engine)
    # without fragments that rounding leaves of the engine's operators
    return outside[outside[:, 1] - outside[:, 0] > RESOLUTION_US]


def _backward(clues: Clues, outside: Intervals) -> Intervals:
    nodes = clues.engine
    if len(nodes) == 0:
        return EMPTY
    begun = np.searchsorted(outside[:, 0], nodes.ravel())
    # two nodes belong to different passes if the thread computed something else between them
    separated = begun[2::2] > begun[1:-1:2]
    first = np.concatenate([[True], separated])
    last = np.concatenate([separated, [True]])
    return np.column_stack([nodes[first, 0], nodes[last, 1]])


def _steps(trace: Trace, backward: Intervals) -> tuple[Steps, list[str]]:
    if trace.steps:
        # annotations of a second thread do not split a step
        return {n: np.array([[s[0, 0], s[-1, 1]]]) for n, s in trace.steps.items()}, []
    optimizer = trace.clues.optimizer
    if optimizer:
        name = max(optimizer, key=lambda call: optimizer[call][-1, 1])
        ends, how = optimizer[name][:, 1], f"each ends with {name}"
    elif len(backward) > 1:
        ends = backward[:, 1]
        how = "each ends with a backward pass, that of a micro-batch too; forward holds the update"
    else:
        ends, how = np.array([np.inf]), "the whole trace is one"
    first, last = trace.clues.span[0]
    bounds = np.concatenate([[first], ends[:-1], [last]])
    steps = {i + 1: bounds[None, i : i + 2] for i in range(len(ends))}
    return steps, [f"steps: inferred: no ProfilerStep in the trace: {how}"]


def _with_waits(trace: Trace, outside: Intervals, steps: Steps, backward: Intervals) -> Intervals:
    """Extend backward passes on the CPU by the wait for collectives that they started."""
    if trace.on_device or len(backward) == 0:
        return backward
    launched = trace.collectives["launched"]
    of_pass = np.searchsorted(backward[:, 0], launched, side="right") - 1
    inside = (of_pass >= 0) & (launched <= backward[of_pass, 1])
    ends = backward[:, 1].copy()
    np.maximum.at(ends, of_pass[inside], trace.collectives["end"][inside])
    waits = np.bincount(of_pass[inside], minlength=len(ends)) > 0
    beyond = [backward[:, 0], trace.clues.aside[:, 0], *(step[:, 1] for step in steps.values())]
    beyond += [calls[:, 0] for calls in trace.clues.optimizer.values()]
    limit = _next(np.concatenate(beyond), backward[:, 1])
    ends = np.minimum(np.where(waits, _next(outside[:, 0], ends), ends), limit)
    return np.column_stack([backward[:, 0], ends])


def _next(times: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each time of `after`, the first of `times` that is not earlier."""
    ordered = np.append(np.sort(times), np.inf)
    return ordered[np.searchsorted(ordered, after)]


def _forward(clues: Clues, outside: Intervals, steps: Steps, backward: Intervals) -> Intervals:
    bounds = np.sort(
        np.concatenate(
            [
                clues.span[:, 0],
                backward[:, 1],
                *(calls[:, 1] for calls in clues.optimizer.values()),
                *(step[:, 0] for step in steps.values()),
            ]
        )
    )
    spans = [EMPTY]
    for start in backward[:, 0]:
        bound = bounds[max(0, np.searchsorted(bounds, start, side="right") - 1)]
        first = np.searchsorted(outside[:, 0], bound - RESOLUTION_US)
        if first < len(outside) and outside[first, 0] < start:
            spans.append(np.array([[outside[first, 0], start]]))
    return difference(merge(np.concatenate(spans)), clues.aside)


def _on_device(trace: Trace, steps: Steps) -> Steps:
    """Return when a device ran the steps, without steps in which it ran nothing."""
    work = np.concatenate(trace.work)
    work = work[np.argsort(work["launched"])]
    done = np.append(-np.inf, np.maximum.accumulate(work["end"]))
    bounds = {
        number: np.maximum(step, done[np.searchsorted(work["launched"], step)])
        for number, step in steps.items()
    }
    return {number: b for number, b in bounds.items() if b[0, 0] < b[0, 1]}


def _notes_on_passes(trace: Trace, labelled: bool) -> Iterator[str]:
    if len(trace.backward) == 0:
        yield (
            "forward, backward, update: unknown: no operator of the autograd engine in the trace, "
            "as in inference and with compiled autograd"
        )
    elif not labelled:
        yield "forward, backward: inferred from the operators of the autograd engine"


def _missing(trace: Trace) -> Iterator[str]:
    """Yield notes on the parts of the breakdown that are unknown, and why."""
    clues = trace.clues
    if clues.launches and not any(len(work) for work in trace.work):
        yield (
            "compute: of the CPU only: work was launched on devices, but the trace holds none of "
            "it: trace with ProfilerActivity.CUDA"
        )
    if clues.calls and not len(trace.collectives):
        yield (
            f"communication: unknown: {clues.calls} calls of collectives, but the trace holds none "
            "of their executions"
        )
    total = sum(len(work) for work in trace.work)
    if clues.earlier:
        yield (
            f"steps: {clues.earlier} of {total} kernels and copies were launched before the trace: "
            "the first step begins after them"
        )
    if clues.unlaunched > clues.earlier:
        yield (
            f"passes: {clues.unlaunched - clues.earlier} of {total} kernels and copies have no "
            "launch in the trace: they count in the pass of what the device began before them"
        )
    if clues.outlasting:
        yield (
            f"times: {clues.outlasting} of {total} kernels and copies last beyond the next one of "
            "their stream, which no stream does: they count until that begins"
        )
