"""The work of a step, and the list of tasks that an engine makes of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from shardlab.config.strategy import CanonicalStrategy
from shardlab.forecast.coding import Coding, Levels
from shardlab.forecast.costs import Costs
from shardlab.forecast.schedule import Phase, Task

COMPUTE = "compute"
"""lane of the training thread"""


class Compute(NamedTuple):
    """Compute seconds of a rank that trains the whole model without communication."""

    forward: float
    """of all micro-batches, as `backward`"""
    backward: float
    rest: float
    """optimizer, clipping, batches"""

    def scaled(self, factor: float) -> "Compute":
        """Return the times on a CPU that is faster or slower by a factor."""
        return Compute(*(factor * each for each in self))


class Overhead(NamedTuple):
    """Overhead of an engine in seconds, on top of the operations themselves."""

    work: float
    """CPU seconds on the training thread per collective; for `slide` also per copy"""
    wait: float
    """per operation, until the threads of all ranks have a core, where each rank has one"""


class Work(NamedTuple):
    """Everything that a step has to compute, communicate and update."""

    strategy: CanonicalStrategy
    """in canonical form"""
    units: tuple[int, ...]
    """elements: for ddp its buckets in the order of backward, else the root and the units"""
    accumulation: int
    """micro-batches"""
    compute: Compute
    overhead: Overhead
    gradients: Levels
    weights: Coding
    update_s: float = 0.0
    """seconds of `compute.rest` in which AdamW updates the whole model"""
    selective: float = 0.0
    """share of forward that blocks with selective checkpointing compute again"""
    holding: bool = True
    """whether gradients are applied only once the norm of all is known; without clipping `slide`
    applies them earlier"""
    of_units: tuple[Levels, ...] = ()
    """codings of gradients by unit, where they differ"""

    def reduced(self, unit: int) -> Levels:
        """Return the coding of the gradients of a unit."""
        return self.of_units[unit] if self.of_units else self.gradients


class Step(ABC):
    """Tasks of all engines: the list, with computation in order."""

    def __init__(self, work: Work, costs: Costs) -> None:
        self.work, self.costs = work, costs
        self.ends: list[str] = []
        """task that ends each step"""
        self.gathered: set[int] = set()
        """units whose parameters are on the device, or on their way to it"""
        self.arriving: dict[int, str] = {}
        """task that brings the parameters of a unit, until their first use"""
        self._tasks: list[Task] = []
        total = sum(work.units)
        self._share = [elements / total for elements in work.units]
        self._forward = work.compute.forward / work.accumulation
        self._replicated = work.strategy.traits.residency == "replicated"
        self._checkpointing = {
            layer: each.activation_checkpointing
            for each in work.strategy.overrides
            for layer in each.layers or ()
        }

    def tasks(self, steps: int = 1) -> list[Task]:
        """Return the tasks of so many steps in the order in which the ranks start them."""
        for _ in range(steps):
            self.add_step()
            self.ends.append(self.compute("end", 0.0))
        return self._tasks

    @abstractmethod
    def add_step(self) -> None:
        """Add the tasks of one more step."""

    def backward_s(self, unit: int) -> float:
        """Return the seconds of backward of a unit in a micro-batch, with what it computes again.

        The root of several units has no block in it, and only blocks are checkpointed.
        """
        work, own = self.work, self._checkpointing.get(unit - 1)
        has_blocks = unit > 0 or len(work.units) == 1 or self._replicated
        mode = own or work.strategy.activation_checkpointing
        share = {"full": 1.0, "selective": work.selective}.get(mode, 0.0) * has_blocks
        return (
            (work.compute.backward + share * work.compute.forward)
            / work.accumulation
            * self._share[unit]
        )

    def compute(self, name: str, seconds: float, after: Sequence[str] = ()) -> str:
        """Add computation; return its name."""
        return self.add(name, COMPUTE, (Phase(seconds),), after)

    def use(self, what: str, unit: int, seconds: float) -> None:
        """Add computation with the parameters of a unit, which waits until they have arrived."""
        arriving = self.arriving.pop(unit, None)
        self.compute(f"{what} {unit}", seconds, [arriving] if arriving else [])

    def launch(
        self, name: str, lane: str, phases: tuple[Phase, ...], after: Sequence[str] = ()
    ) -> str | None:
        """Add a task that starts when all computation so far is done; None if there is nothing.

        The engine's own work for it is computation, also where a rank has no peers.
        """
        before = self.compute(f"start {name}", self.work.overhead.work)
        if not phases:
            return None
        return self.add(name, lane, self.awaited(phases), [before, *after])

    def awaited(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """Return the phases with the wait for other ranks before each that communicates."""
        wait = Phase(wait=self.work.overhead.wait * self.costs.ranks_per_core)
        every = [(wait, phase) if phase.operation else (phase,) for phase in phases]
        return tuple(chain.from_iterable(every))

    def add(
        self, name: str, lane: str, phases: tuple[Phase, ...], after: Sequence[str] = ()
    ) -> str:
        """Add a task to a lane; return its name."""
        name = f"{len(self._tasks)} {name}"
        self._tasks.append(Task(name, lane, phases, tuple(after)))
        return name
