"""The contract of a policy, and the policies that predict nothing."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardlab.config.strategy import CanonicalStrategy
from shardlab.search.changes import changes


class Known(NamedTuple):
    """Everything that a policy sees of a table."""

    strategies: Mapping[str, CanonicalStrategy]
    """all that may be measured, by hash"""
    step_ms: Mapping[str, list[float]]
    """of those that were measured, in this order, the start first; one per repetition"""
    alone_ms: list[float]
    """steps without communication, of the same repetitions"""
    ratios: Mapping[str, float]
    """step over the start's, of those that were measured"""

    @property
    def best(self) -> str:
        """The strategy whose steps were measured as the shortest."""
        return min(self.ratios, key=self.ratios.__getitem__)

    @property
    def new(self) -> list[str]:
        """The strategies that were not measured."""
        return [key for key in self.strategies if key not in self.ratios]


class Choice(NamedTuple):
    """Answer of a policy."""

    strategy: str | None
    """hash of the one to measure next, which is new; None: an abstention, which ends the search"""
    infeasible: int = 0
    """proposals that were none of the new strategies, before this one was chosen"""
    flips: int = 0
    """answers that depended on the order of the candidates"""


class Policy(ABC):
    """Chooses what to measure next on one table; a new object for each replay.

    Equal seeds and equal measurements give equal choices.
    """

    name: str

    @abstractmethod
    def choose(self, known: Known) -> Choice:
        """Return the choice; `known` has at least one new strategy."""


class RandomPolicy(Policy):
    """Draws from all new strategies alike."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, known: Known) -> Choice:  # noqa: D102
        return Choice(self._random.choice(known.new))


class GreedyPolicy(Policy):
    """Changes as few settings as possible of the best so far; ties are drawn."""

    name = "greedy"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, known: Known) -> Choice:  # noqa: D102
        held = known.strategies[known.best]
        counts = {key: len(changes(held, known.strategies[key])) for key in known.new}
        least = min(counts.values())
        return Choice(self._random.choice([key for key, n in counts.items() if n == least]))


class ListPolicy(Policy):
    """Measures strategies in an order that was given before, whatever it measures.

    Args:
        order: hashes; after the last one the policy abstains.
    """

    def __init__(self, name: str, order: Iterable[str]) -> None:
        self.name, self._order = name, list(order)

    def choose(self, known: Known) -> Choice:  # noqa: D102
        new = set(known.new)
        return Choice(next((key for key in self._order if key in new), None))
