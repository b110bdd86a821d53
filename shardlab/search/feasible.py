"""Strategies of the grid that are legal and fit in memory, each as fast as memory allows."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from shardlab.config.schema import Space
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import UnitSize
from shardlab.config.validation import check_fits
from shardlab.core.errors import UserError
from shardlab.models.memory import Sizes, device_memory
from shardlab.search.grid import documents, frugality


class Shapes(Protocol):
    """Reads the model that is searched for; a stage passes one, as models need torch."""

    layers: int
    """transformer blocks"""
    samples: int
    """that one rank sees in a step"""
    on_gpu: bool
    """whether the ranks compute on GPUs"""

    def units(self, strategy: CanonicalStrategy) -> Sequence[UnitSize]:
        """Return what the strategy gathers or reduces together, in order of use."""

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on.

        Raises:
            UserError: the strategy does not fit the model.
        """


class Feasible(NamedTuple):
    """A strategy that can be tried."""

    strategy: CanonicalStrategy
    hash: str
    memory_bytes: int
    """peak of a rank"""


Peak = Callable[[CanonicalStrategy], int]
"""peak memory of a rank under a strategy, bytes; raises UserError where it does not fit the model
"""


def formula_bytes(strategy: CanonicalStrategy, shapes: Shapes, world_size: int) -> int:
    """Return the peak of a rank by the closed form, of the memory that limits it."""
    need = device_memory(strategy, shapes.sizes(strategy), world_size, shapes.on_gpu)
    return sum(need.values())


def feasible(
    space: Space, shapes: Shapes, world_size: int, peak: Peak, limit_bytes: int, count: Counter[str]
) -> Iterator[Feasible]:
    """Yield the feasible strategies of the grid, each meaning once, in a fixed order.

    Of strategies that only differ in how they save activation memory the fastest that fits comes,
    and the others are spared.

    Args:
        count: how many are `legal`, `beyond memory` and `spared`.
    """
    seen: set[str] = set()
    levels = frugality(shapes.samples)
    for document in documents(space, shapes.layers, world_size):
        for number, level in enumerate(levels):
            try:
                strategy = parse_strategy(document | level).canonical()
                check_fits(strategy, world_size, shapes.samples)
                memory = peak(strategy)
            except UserError:
                if number == 0:
                    break  # no level changes what is wrong with the rest
                continue
            key = strategy.hash()
            if key in seen:
                break
            seen.add(key)
            count["legal"] += 1
            if memory <= limit_bytes:
                spared = len(levels) - number - 1
                count.update({"legal": spared, "spared": spared})
                yield Feasible(strategy, key, memory)
                break
            count["beyond memory"] += 1
