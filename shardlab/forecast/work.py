"""What a step has to do, and the list of tasks that engines make of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from shardlab.forecast.costs import Coding, Costs
from shardlab.forecast.schedule import Phase, Task
from shardlab.strategy.strategy import Strategy

COMPUTE = "compute"
"""the lane of the thread that trains"""


class Compute(NamedTuple):
    """Seconds of a rank that trains the whole model by itself."""

    forward: float
    """all micro-batches together, as `backward`"""
    backward: float
    rest: float
    """optimizer, clipping, batches"""

    def scaled(self, factor: float) -> "Compute":
        """The same on a faster or slower processor."""
        return Compute(*(factor * each for each in self))


class Overhead(NamedTuple):
    """Seconds that an engine takes for each collective, beside the operation itself."""

    work: float
    """of the processor, where the engine computes; for each copy of `slide`, too"""
    wait: float
    """until the threads of all ranks have a core, where each rank has one"""


class Work(NamedTuple):
    """What a step has to do."""

    strategy: Strategy
    """in its canonical form"""
    units: tuple[int, ...]
    """elements; of ddp its buckets in the order of backward, else the root and the units"""
    accumulation: int
    """micro-batches"""
    compute: Compute
    overhead: Overhead
    gradients: Coding
    weights: Coding
    update_s: float = 0.0
    """of `compute.rest`: AdamW of the whole model"""
    holding: bool = True
    """gradients are applied when the norm of all is known; where they are not clipped, `slide`
    applies them earlier"""


class Step(ABC):
    """What all engines have in common: the list, and computation in its order."""

    def __init__(self, work: Work, costs: Costs) -> None:
        self.work, self.costs = work, costs
        self.ends: list[str] = []
        """the task that is the end of each step"""
        self._tasks: list[Task] = []
        total = sum(work.units)
        self._share = [elements / total for elements in work.units]
        again = work.strategy.activation_checkpointing == "full"
        micro = work.accumulation
        self._forward = work.compute.forward / micro
        self._backward = (work.compute.backward + again * work.compute.forward) / micro

    def tasks(self, steps: int = 1) -> list[Task]:
        """Of so many steps, in the order in which the ranks start them."""
        for _ in range(steps):
            self.add_step()
            self.ends.append(self.compute("end", 0.0))
        return self._tasks

    @abstractmethod
    def add_step(self) -> None:
        """Adds the tasks of one more step."""

    def compute(self, name: str, seconds: float, after: Sequence[str] = ()) -> str:
        """Adds computation; returns its name."""
        return self.add(name, COMPUTE, (Phase(seconds),), after)

    def launch(
        self, name: str, lane: str, phases: tuple[Phase, ...], after: Sequence[str] = ()
    ) -> str | None:
        """Adds what starts when all computation so far is done; None if there is nothing.

        The engine's own work for it is computation, also where one rank has nobody to talk to.
        """
        before = self.compute(f"start {name}", self.work.overhead.work)
        if not phases:
            return None
        return self.add(name, lane, self.awaited(phases), [before, *after])

    def awaited(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """With the wait for the other ranks, where these communicate."""
        if not any(phase.operation for phase in phases):
            return phases
        return Phase(wait=self.work.overhead.wait * self.costs.ranks_per_core), *phases

    def add(
        self, name: str, lane: str, phases: tuple[Phase, ...], after: Sequence[str] = ()
    ) -> str:
        """Adds a task to a lane; returns its name."""
        name = f"{len(self._tasks)} {name}"
        self._tasks.append(Task(name, lane, phases, tuple(after)))
        return name
