"""Order of copies, updates and off-loads under random delays."""

import random
import threading
import time
from itertools import cycle

import pytest

from shardlab.engines.sliding_checkpoint import FOLDER_VARIABLE
from shardlab.engines.slide.rank_progress import UPDATED
from tests.engines.small_engine import DelayedCopies, engine_of, train
from tests.ranks import on_ranks


class TracedCopies(DelayedCopies):
    """Notes what is copied from or to host memory: the address of its source, and its target."""

    def __init__(self, seed, events):
        super().__init__(seed)
        self._events = events

    def copy(self, target, source):
        self._events.append(("copy", source.data_ptr(), target))
        super().copy(target, source)


def traced(engine, events, seed):
    """Also notes updates, which take a time of their own."""
    delays, progress = random.Random(seed), engine._memory.progress
    publish = progress.publish

    def slow(kind, unit, step):
        if kind == UPDATED:
            time.sleep(delays.random() * 4e-3)
            events.append(("update", unit, step))
        publish(kind, unit, step)

    progress.publish = slow


def slot_of(part):
    return part.untyped_storage().data_ptr()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("seed", range(3))
@on_ranks(1)
def test_units_come_after_their_update_and_no_gradient_is_lost(group, seed, clip) -> None:
    events = []
    copies = TracedCopies(seed, events)
    engine = engine_of(group, {"engine": "slide"}, clip, copies, accumulation=1)
    traced(engine, events, seed)
    train(engine, 4)
    engine.synchronize()
    sources = {unit.source.data_ptr(): unit for unit in engine.units}
    leaving = cycle([*(unit.index for unit in reversed(engine.units))])
    had, missing = {}, 0
    updates, arrived = dict.fromkeys(range(9), 0), dict.fromkeys(range(9), 0)
    for what, one, other in events:
        if what == "update":
            updates[one] += 1
            assert updates[one] == arrived[one]
        elif one in sources:
            unit = sources[one].index
            assert updates[unit] == arrived[unit], "all that has landed is applied"
        else:
            if not missing:  # the first part of the next one
                slot, unit = slot_of(other), next(leaving)
                before, had[slot] = had.get(slot), unit
                assert before is None or updates[before] == arrived[before], "used too early"
                arrived[unit] += 1
                assert arrived[unit] == updates[unit] + 1
                missing = engine.units[unit].size
            assert slot_of(other) == slot
            missing -= other.numel()
    assert not missing
    assert [updates[unit.index] for unit in engine.units] == [4] * len(engine.units)
    assert len(had) == (1 + 3 if clip is None else len(engine.units))


@on_ranks(1)
def test_training_thread_does_not_wait_for_updates(group) -> None:
    engine = engine_of(group, {"engine": "slide"}, 0.5)
    going = threading.Event()
    update = engine._optimizer._update

    def held(*arguments):
        assert going.wait(20)
        update(*arguments)

    engine._optimizer._update = held
    train(engine, 1)  # returns while no update can end
    assert engine.units[0].updates == 1
    going.set()
    train(engine, 1, first=1)


@pytest.mark.parametrize("window", [2, 3])
@on_ranks(1)
def test_first_units_of_the_next_step_are_prefetched_during_backward(group, window) -> None:
    events, held = [], []
    document = {"engine": "slide", "window": window}
    engine = engine_of(group, document, None, TracedCopies(0, events))
    traced(engine, events, 0)
    train(engine, 1)
    others = engine.units[2 : 1 + window]  # all but the root and the first one
    schedule = engine.module.schedule
    begun = schedule.before_backward

    def came(unit):
        update = ("update", unit.index, 2)
        later = events[events.index(update) :] if update in events else []
        return unit.source.data_ptr() in [source for what, source, _ in later if what == "copy"]

    def until_the_others_came(index):
        begun(index)
        if index == 0:
            deadline = time.monotonic() + 20
            while not all(map(came, others)) and time.monotonic() < deadline:
                time.sleep(1e-3)
            held.append([*map(came, others)])

    schedule.before_backward = until_the_others_came
    train(engine, 1, first=1)
    assert held == [[True] * (window - 1)]


@on_ranks(1)
def test_gradients_of_a_unit_are_offloaded_in_parts(group) -> None:
    events, early = [], {}
    copies = TracedCopies(0, events)
    engine = engine_of(group, {"engine": "slide"}, None, copies)
    train(engine, 1)
    sources = {unit.source.data_ptr() for unit in engine.units}
    offload, behind = engine.module.schedule._offload, []
    start = offload.start

    def noting(unit, first, last):
        copies._outward.drain()
        out = sum(target.numel() for _, source, target in events if source not in sources)
        early[unit] = (out - sum(behind)) / unit.size
        behind.append(unit.size)
        start(unit, first, last)

    offload.start = noting
    events.clear()
    train(engine, 1, first=1)
    root, *others = engine.units
    assert early[root] == 0
    assert all(0.5 < early[unit] < 1 for unit in others)


@pytest.mark.parametrize("moments", ["memory", "disk"])
@on_ranks(2)
def test_reading_between_steps_costs_the_next_step_nothing(
    group, moments, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    counts = []
    for reads in (False, True):
        events = []
        copies = TracedCopies(0, events)
        engine = engine_of(group, {"engine": "slide", "moments": moments}, copies=copies)
        for step in range(3):
            train(engine, 1, first=step)
            if reads:
                read = engine.in_host_memory()
                assert all(float(part.norm()) >= 0 for part in read["exp_avg"].values())
        engine.synchronize()
        counts.append(len(events))
    assert counts[0] == counts[1]
