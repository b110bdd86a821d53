"""CPU time of others during a timing, from the times of its ranks."""

from typing import Any

import pytest

from shardlab.results.contention import Contention, disturbed, warnings_of


def times(machine: str = "a", cpus: tuple[int, ...] = (0, 1), **changes: Any) -> dict[str, Any]:
    """A rank that computes for nine of ten seconds."""
    busy, stolen = {"0": 10.0, "1": 9.0, "2": 7.0}, {"0": 0.1, "1": 0.1, "2": 7.0}
    fields = {"seconds": 10.0, "own": 9.0, "busy": busy, "stolen": stolen}
    return {"machine": machine, "cpus": [*cpus], **fields, **changes}


def test_what_the_ranks_used_is_nobody_elses() -> None:
    """CPU 2 is none of theirs."""
    contention = Contention.of([times(), times()])
    assert contention is not None
    assert (contention.foreign, contention.stolen) == pytest.approx((1 / 20, 0.2 / 20))
    assert not disturbed(contention) and disturbed(Contention.of([times(own=7.0), times(own=7.5)]))


def test_ranks_that_are_pinned_count_their_own_cpus() -> None:
    contention = Contention.of([times(cpus=(0,)), times(cpus=(1,), own=10.0)])
    assert contention is not None
    assert contention.foreign == 0


def test_the_machine_with_most_contention_counts() -> None:
    contention = Contention.of([times(), times("b", own=1.0)])
    assert contention is not None
    assert contention.foreign == pytest.approx((19 - 1) / 20)


def test_nothing_is_known_where_the_kernel_counts_nothing() -> None:
    nothing = {str(cpu): 0.0 for cpu in range(3)}
    assert Contention.of([times(busy=nothing, stolen=nothing)]) is None
    assert not disturbed(None)


def test_a_warning_names_each_disturbed_timing_once() -> None:
    quiet, busy = Contention(foreign=0.01, stolen=0.0), Contention(foreign=0.2, stolen=0.05)
    warnings = warnings_of([("a", quiet), ("b", busy), ("b", busy), ("c", None)])
    assert warnings == [
        "b: others used 25 % of its CPUs during it",
        "c: the load of others during it is unknown",
    ]
