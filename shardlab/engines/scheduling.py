"""Shared parts of `manual` and `slide`: wrapper, hooks of units, vectors of gradients."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardlab.comm.background import Running
from shardlab.comm.routes import Attachable
from shardlab.core.torch_private import tree_leaves
from shardlab.models.units import UnitPlan

_MOST_VECTORS = 2
"""in flight: with fewer, backward waits for each; more would only take memory"""


class UnitSchedule(ABC):
    """Order of what happens to units, called by hooks; a number is a unit's place in the model."""

    @abstractmethod
    def before_forward(self, index: int) -> None:
        """Prepare a unit that is about to compute."""

    @abstractmethod
    def after_forward(self, index: int) -> None:
        """Note that a unit has computed."""

    @abstractmethod
    def before_backward(self, index: int) -> None:
        """Prepare a unit for backward; called once for each output tensor with a gradient."""

    @abstractmethod
    def after_backward(self) -> None:
        """Do what is left of a backward pass; called by the engine."""


class ScheduledModule(nn.Module, Attachable):
    """Wrapper of `model` whose hooks call `schedule`, which a subclass sets.

    Args:
        plans: its units, in the order of their use; what is left makes up the root.
    """

    schedule: UnitSchedule

    def __init__(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        super().__init__()
        # not a submodule: its parameters have memory only while they are used
        self._model = [model]
        for index, plan in enumerate(plans):
            self._watch_uses(index, plan.modules)

    def _watch_uses(self, index: int, modules: Sequence[nn.Module]) -> None:
        def watch_backward(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.schedule.before_backward(index))

        modules[0].register_forward_pre_hook(lambda *_: self.schedule.before_forward(index))
        modules[-1].register_forward_hook(lambda *_: self.schedule.after_forward(index))
        for module in modules:
            module.register_forward_hook(watch_backward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self._model[0](*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model, too, which is no submodule."""
        self._model[0].train(mode)
        return super().train(mode)


class VectorPool:
    """Vectors for gradients in flight, as few as are in use at a time, which are used again.

    Memory allocated for each would lie between the holes that freed ones leave.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._running: deque[tuple[Running, Tensor]] = deque()
        self._spare: dict[int, list[Tensor]] = {}

    def acquire(self, size: int) -> Tensor:
        """Return a vector of so many elements, uninitialised; wait while too many are in flight."""
        while len(self._running) >= _MOST_VECTORS:
            self._wait_for_oldest()
        spare = self._spare.setdefault(size, [])
        return spare.pop() if spare else torch.empty(size, dtype=self._dtype, device=self._device)

    def release_after(self, running: Running, vector: Tensor) -> None:
        """Return a vector to the pool as soon as a call has ended."""
        self._running.append((running, vector))

    def wait(self) -> None:
        """Wait until none is in flight; raise the error of the first call that failed."""
        while self._running:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        running, vector = self._running.popleft()
        running.wait()
        self._spare[vector.numel()].append(vector)
