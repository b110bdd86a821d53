"""When the units of a model are gathered, freed and reduced."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective
from shardlab.engines.manual.unit import FlatUnit

_REDUCTIONS = 2
"""whose gradients wait in memory of their own while backward goes on"""


class Schedule:
    """The order of communication of one step, for units that are used one after another.

    forward   unit i is gathered while unit i - 1 computes, and freed after its use;
    backward  the same from the last unit to the first, and what a unit's parameters have gathered
              of gradients is reduced while the units before it compute;
    finish    waits for the last reductions.

    The root (what belongs to no unit: embedding, head) is gathered first and kept until its own
    gradients are there. The last unit stays between forward and backward, where it is next. Gathers
    and reductions have a thread each, and so a process group each.

    Args:
        units: in the order of their use; the root is not among them.
        depth: how many units ahead gathering starts.
        reshard: free a unit between forward and backward.
    """

    def __init__(
        self,
        root: FlatUnit,
        units: list[FlatUnit],
        gather: Collective,
        reduce: Collective,
        depth: int = 1,
        reshard: bool = True,
    ) -> None:
        self.root = root
        self.units = units
        self.gather = gather
        self.reduce = reduce
        self.reducing = True
        """whether this backward pass is the last one of its step"""
        self._depth = depth
        self._reshard = reshard
        self._backward = False
        self._gathers = Background("gather")
        self._reductions = Background("reduce")
        self._pending: dict[str, Running] = {}
        self._running: deque[tuple[Running, Tensor]] = deque()
        self._vectors: dict[int, list[Tensor]] = {}
        self._missing: dict[str, int] = {}

    def begin(self) -> None:
        """Before the forward pass of the model."""
        self._backward = False
        self._missing = {
            unit.name: sum(p.requires_grad for p in unit.parameters.values())
            for unit in (self.root, *self.units)
        }
        self._start(self.root)
        self._ahead(range(self._depth))
        self._wait(self.root)

    def before_forward(self, index: int) -> None:
        """Unit `index` is about to compute."""
        if self._backward:  # again, for activation checkpointing
            self._need(index, [])
        else:
            self._need(index, range(index + 1, index + 1 + self._depth))

    def after_forward(self, index: int) -> None:
        """Unit `index` has computed."""
        if self._reshard and not self._backward and index + 1 < len(self.units):
            self.units[index].free()

    def before_backward(self, index: int) -> None:
        """The gradient of what unit `index` returned is there."""
        self._backward = True
        self._need(index, range(index - 1, index - 1 - self._depth, -1))

    def accumulated(self, unit: FlatUnit) -> None:
        """One more parameter of a unit has its gradient."""
        self._missing[unit.name] -= 1
        if self._missing[unit.name] == 0:
            self._complete(unit)

    def finish(self) -> None:
        """After the last backward pass of a step: the gradients of all shards are there."""
        for unit in (*reversed(self.units), self.root):
            if self._missing[unit.name] > 0:  # of parameters that the model did not use
                self._complete(unit)
        while self._running:
            self._settle()
        for unit in (self.root, *self.units):
            unit.shard.grad = unit.gradient

    def all_gathered(self, use: Callable[[FlatUnit], None]) -> None:
        """Calls `use` for every unit while it is whole."""
        for unit in (self.root, *self.units):
            there = unit.allocated
            self._start(unit)
            self._wait(unit)
            use(unit)
            if not there:
                unit.free()

    def _need(self, index: int, ahead: "range | list[int]") -> None:
        self._start(self.units[index])
        self._ahead(ahead)
        self._wait(self.units[index])

    def _ahead(self, indices: "range | list[int]") -> None:
        for index in indices:
            if 0 <= index < len(self.units):
                self._start(self.units[index])

    def _start(self, unit: FlatUnit) -> None:
        if unit.allocated:
            return
        unit.allocate()
        self._pending[unit.name] = self._gathers.start(
            self.gather.all_gather, unit.full, unit.shard.data, unit.message
        )

    def _wait(self, unit: FlatUnit) -> None:
        pending = self._pending.pop(unit.name, None)
        if pending is not None:
            with torch.profiler.record_function(f"shardlab::wait for {unit.name}"):
                pending.wait()

    def _complete(self, unit: FlatUnit) -> None:
        """All gradients of a unit are there."""
        self._missing[unit.name] = 0
        if unit is not self.root or self.reducing:
            unit.free()
        if not self.reducing:
            return
        while len(self._running) >= _REDUCTIONS:
            self._settle()
        kept = self._vectors.setdefault(unit.full.numel(), [])
        vector = kept.pop() if kept else torch.empty(unit.full.numel())
        unit.collect(vector)
        scale = 1 / self.reduce.world_size
        running = self._reductions.start(
            self.reduce.reduce_scatter, unit.gradient, vector, scale, unit.message
        )
        self._running.append((running, vector))

    def _settle(self) -> None:
        """Waits for the oldest reduction."""
        running, vector = self._running.popleft()
        running.wait()
        self._vectors[vector.numel()].append(vector)
