"""Times of forward, backward, update and optimizer within one step.

On the CPU what happens during a pass belongs to it. What a device does belongs to the pass in which
the CPU launched it, however much later it runs; the pass then lasts from the first to the last of
it, and backward begins where forward has ended.
"""

import numpy as np

from shardlab.profiling.clues import EVER
from shardlab.profiling.intervals import (
    EMPTY,
    Intervals,
    difference,
    intersection,
    length,
    merge,
    union,
)
from shardlab.profiling.trace import Trace

_PARTS = ("forward", "backward", "update")


def times_of_passes(trace: Trace, step: Intervals, host: Intervals) -> dict[str, float | None]:
    """Return the milliseconds of each pass, and of the work launched by each.

    Args:
        step: when the step ran.
        host: when the CPU ran or launched it.

    Returns:
        None for each time if the step has no backward pass.
    """
    forward, backward = (intersection(each, host) for each in (trace.forward, trace.backward))
    optimizer = [intersection(each, host) for each in trace.clues.optimizer.values()]
    stepping = merge(np.concatenate([EMPTY, *optimizer]))
    if trace.on_device:
        first = _lasting(trace, forward)
        second = difference(_lasting(trace, backward), first)
        launched = (forward, backward, difference(EVER, union(forward, backward)))
        spans = (first, second, difference(step, union(first, second)))
        done = [
            (trace.kernels.during(window), trace.collectives.during(window)) for window in launched
        ]
        stepping = _lasting(trace, stepping)
    else:
        spans = (forward, backward, difference(step, union(forward, backward)))
        done = [(trace.compute(span), trace.communication(span)) for span in spans]
    known = len(backward) > 0
    result = {"optimizer_ms": _ms(intersection(stepping, step)) if len(stepping) else None}
    for part, span, (compute, comm) in zip(_PARTS, spans, done, strict=True):
        result[f"{part}_ms"] = _ms(intersection(span, step)) if known else None
        result[f"{part}_compute_ms"] = _ms(intersection(compute, step)) if known else None
        result[f"{part}_comm_ms"] = _ms(intersection(comm, step)) if known else None
    return result


def _lasting(trace: Trace, labelled: Intervals) -> Intervals:
    """Return the span on a device from the first to the last kernel that each labelled range
    launched."""
    spans = [EMPTY]
    for start, end in labelled:
        window = np.array([[start, end]])
        done = np.concatenate([work.during(window) for work in trace.work])
        if len(done):
            spans.append(np.array([[done[:, 0].min(), done[:, 1].max()]]))
    return merge(np.concatenate(spans))


def _ms(times: Intervals) -> float:
    return length(times) / 1000
