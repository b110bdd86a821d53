"""Moments on disk: loaded one unit ahead of their update and stored after it."""

from collections.abc import Sequence

from shardlab.forecast.sliding_costs import Movements
from shardlab.forecast.work import Step

UPDATE, LOAD, STORE = "update", "load", "store"


class MomentsOnDisk:
    """Tasks of updates whose moments are on disk (`shardlab.engines.slide.moments`).

    Args:
        order: of updates in every step.
    """

    def __init__(self, step: Step, moves: Movements, order: Sequence[int]) -> None:
        self._step, self._moves = step, moves
        self._following = dict(zip(order, [*order[1:], order[0]], strict=True))
        self._loads: dict[int, str] = {}
        self._stores: dict[int, str] = {}
        """name of the last update"""

    def update(self, unit: int) -> str:
        """Add an update; return the name of the task after which the unit may be used."""
        add, following = self._step.add, self._following[unit]
        load = self._loads.pop(unit) if unit in self._loads else self._load(unit, [])
        loaded = add(f"loaded {unit}", UPDATE, (), [load])
        own = [self._stores[following]] if following in self._stores else []
        self._loads[following] = self._load(following, [loaded, *own])
        updated = add(f"update {unit}", UPDATE, self._moves.update(unit))
        # the buffer is free once its unit has been stored
        stored = add(f"stored before {unit}", UPDATE, (), [*self._stores.values()])
        self._stores = {unit: add(f"store {unit}", STORE, self._moves.store(unit), [stored])}
        return updated

    def _load(self, unit: int, after: Sequence[str]) -> str:
        return self._step.add(f"load {unit}", LOAD, self._moves.load(unit), after)
