"""The window of device memory: its size, poisoned slots, saved views."""

import pytest
import torch

from tests.engines.small_engine import (
    LAYERS,
    MODES,
    DelayedCopies,
    differing,
    engine_of,
    states_of,
    train,
)
from tests.ranks import on_ranks


def watched(schedule, name, alive):
    """Note how many units have a slot at each call of a method that marks a use."""
    call = getattr(schedule, name)

    def note(index):
        call(index)
        shown = [
            unit.index - 1
            for unit in schedule.units
            if any(any(p.stride()) for p in unit.parameters.values())
        ]
        assert index in shown
        alive.append(len(shown))

    setattr(schedule, name, note)


@pytest.mark.parametrize("again", ["none", "selective", "full"])
@pytest.mark.parametrize("window", [2, 3])
@on_ranks(1)
def test_no_more_units_are_on_the_device_than_the_window_has_slots(group, window, again) -> None:
    document = {"engine": "slide", "window": window, "activation_checkpointing": again}
    engine, alive = engine_of(group, document), []
    for name in ("before_forward", "before_backward"):
        watched(engine.module.schedule, name, alive)
    train(engine, 2, micro=2)
    assert len(alive) == 2 * 2 * 2 * LAYERS
    assert max(alive) == window


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_poison_in_freed_slots_reaches_nothing(group, mode, clip) -> None:
    # with every mode and with either way of clipping
    again = ("none", "full")[(list(MODES).index(mode) + (clip is None)) % 2]
    document = {**MODES[mode], "activation_checkpointing": again}
    clean, poisoned = (engine_of(group, document, clip, DelayedCopies(seed)) for seed in range(2))
    poisoned.module.schedule.window.poison = True
    assert torch.equal(train(clean, 2, micro=2), train(poisoned, 2, micro=2))
    assert not differing(states_of(clean), states_of(poisoned))


@on_ranks(1)
def test_parameters_outside_of_the_window_are_nan(group) -> None:
    engine = engine_of(group, {"engine": "slide"})
    train(engine, 1)
    engine.synchronize()
    last = engine.module.schedule.units[-1]
    assert all(bool(parameter.isnan().all()) for parameter in last.parameters.values())


@on_ranks(1)
def test_a_saved_view_is_found_in_the_slot_of_its_unit_and_nowhere_else(group) -> None:
    engine = engine_of(group, {"engine": "slide"})
    schedule = engine.module.schedule
    window, unit = schedule.window, schedule.units[0]
    vector = window.admit(unit).copy_(torch.arange(unit.size))
    saved = window._pack(vector[:32].view(4, 8).t())
    assert torch.equal(window._unpack(saved), vector[:32].view(4, 8).t())
    assert window._unpack(saved).untyped_storage().data_ptr() == vector.data_ptr()
    window.release(unit)
    with pytest.raises(AssertionError, match="not on the device"):
        window._unpack(saved)


@on_ranks(1)
def test_unit_with_old_parameters_is_not_in_the_window(group) -> None:
    engine = engine_of(group, {"engine": "slide"})
    window, (first, second, third, _) = engine._schedule.window, engine._schedule.units
    slot = window.admit(first).data_ptr()
    window.admit(second)
    assert first in window and not window.has_room(third)
    first.updates += 1
    assert first not in window and window.has_room(first) and not window.has_room(third)
    assert window.admit(first).data_ptr() == slot and first in window
    assert len(window.alive()) == 2


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("window", [2, 3, LAYERS])
@on_ranks(1)
def test_unit_fetched_before_its_update_is_fetched_again(group, window, clip) -> None:
    document = {"engine": "slide", "window": window}
    plain, hasty = (engine_of(group, document, clip) for _ in range(2))
    schedule, early = hasty._schedule, []
    free = schedule._free

    def and_fill_the_window(unit):
        free(unit)
        before = {each.name for each in schedule.window.alive()}
        schedule._fetch_all(schedule.units)
        early.extend({each.name for each in schedule.window.alive()} - before)

    schedule._free = and_fill_the_window
    assert torch.equal(train(hasty, 2), train(plain, 2))
    assert not differing(states_of(hasty), states_of(plain))
    assert early


@on_ranks(1)
def test_there_are_no_more_slots_than_units(group) -> None:
    documents = [{"engine": "slide", "window": window} for window in (LAYERS, 40)]
    least, wide = (engine_of(group, document) for document in documents)
    assert wide._schedule.window.slots == LAYERS
    assert torch.equal(train(wide, 3), train(least, 3))
