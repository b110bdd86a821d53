"""Skew of collectives: waiting for the last rank, separated from transfer.

The i-th collective of an operation and a unit in a step is the same one on all ranks. Until the
last rank has begun it the others wait; from then on bytes move. On one machine all ranks read one
clock. Between machines the difference of their clocks is added to one of the two and taken from the
other: keep it below what is to be seen (NTP: about a millisecond, PTP: microseconds).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.intervals import EMPTY, Intervals, covers, difference, merge
from shardlab.profiling.trace import Trace

_Kind = tuple[int, str, str]
"""step, operation, unit"""
_Key = tuple[_Kind, int]


class Phases(NamedTuple):
    """Times of the matched collectives of one rank."""

    waiting: Intervals
    """some collective waits for a rank and none transfers"""
    transfer: Intervals


def phases(ranks: Mapping[int, Trace]) -> dict[int, Phases]:
    """Return waiting and transfer time of the collectives of each rank.

    Those of a kind that the ranks have not equally often in a step are matched with none, nor is
    what began outside of the steps.
    """
    keys = {rank: list(_keys(trace)) for rank, trace in ranks.items()}
    totals = [Counter(kind for kind, _ in each) for each in keys.values()]
    begun: dict[_Key, float] = {}
    for rank, trace in ranks.items():
        for key, start in zip(keys[rank], trace.collectives.times[:, 0], strict=True):
            begun[key] = max(begun.get(key, -np.inf), float(start))

    def is_matched(kind: _Kind) -> bool:
        return kind[0] >= 0 and all(each[kind] == totals[0][kind] for each in totals)

    return {
        rank: _phases(
            trace.collectives.times,
            np.array([is_matched(kind) for kind, _ in keys[rank]], dtype=bool),
            [begun[key] for key in keys[rank]],
        )
        for rank, trace in ranks.items()
    }


def _keys(trace: Trace) -> Iterator[_Key]:
    """Return kind and ordinal within its kind of each collective, in order."""
    step_of = np.full(len(trace.collectives.times), -1)
    for number, step in trace.steps.items():
        step_of[covers(step, trace.collectives.times[:, 0])] = number
    seen: Counter[_Kind] = Counter()
    collectives = trace.collectives
    for step, operation, unit in zip(
        step_of, collectives.operations, collectives.units, strict=True
    ):
        kind = (int(step), str(operation), str(unit))
        yield kind, seen[kind]
        seen[kind] += 1


def _phases(times: Intervals, matched: NDArray[np.bool_], begun: Sequence[float]) -> Phases:
    if not matched.any():
        return Phases(EMPTY, EMPTY)
    start, end = times[matched].T
    last = np.array(begun)[matched].clip(start, end)
    transfer = merge(np.column_stack([last, end]))
    return Phases(difference(merge(times[matched]), transfer), transfer)
