"""Settings of what is tuned: `tune` and `methods` of params.yaml."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.types import Betas, Count, Name, Positive, Seed, WorldSize
from shardlab.train.settings import Train

_Rates = Annotated[tuple[Positive, ...], AS_TUPLE, Field(min_length=1)]


def _number(key: Any) -> Any:
    """Return the number that a key of a mapping is, which JSON writes as text."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


class Tune(Document):
    """Search for the settings by which a method reaches one loss first: the same for every
    method."""

    target_loss: Positive
    """validation loss to reach, nats per token"""
    learning_rates: _Rates
    """ascending grid with the one of `train`, where the search begins"""
    betas: Annotated[tuple[Betas, ...], AS_TUPLE, Field(min_length=1)] | None = None
    """grid of the second axis, with those of `train`, where the search begins; null: those of
    `train` alone"""
    tries: Count = 8
    """most settings that are tried of a method, for each number of micro-batches"""
    lengths: int = Field(2, ge=0, le=10)
    """most numbers of steps that are tried besides the first, up or down"""
    micro_batches: Annotated[
        dict[Annotated[Count, BeforeValidator(_number)], Positive], Field(min_length=1)
    ]
    """micro-batches of a step, of all ranks together, each with the tokens of the runs that are
    tried over those of a run of `train`. Numbers that the ranks do not divide are left out"""

    @model_validator(mode="after")
    def _are_grids(self) -> Self:
        if [*self.learning_rates] != sorted({*self.learning_rates}):
            raise ValueError("learning_rates must ascend")
        if self.betas and len({*self.betas}) < len(self.betas):
            raise ValueError("betas: two are the same: remove one")
        return self

    def grid(self, train: Train) -> tuple[tuple[float, ...], tuple[Betas, ...]]:
        """Return learning rates and betas."""
        return self.learning_rates, self.betas or (train.betas,)

    def equal_steps(self, micro_batches: int, train: Train) -> int:
        """Return the steps that see the tokens of a run of `train`."""
        return train.steps * train.world_size * train.accumulation // micro_batches

    def first_steps(self, micro_batches: int, train: Train) -> int:
        """Return the steps of the runs by which learning rate and betas are chosen."""
        return round(self.micro_batches[micro_batches] * self.equal_steps(micro_batches, train))


class Method(Document):
    """A way to train, with settings of its own for each number of micro-batches."""

    strategies: Annotated[tuple[Name, ...], AS_TUPLE, Field(min_length=1)]
    """names of strategies, whose updates are the same up to rounding: the first is trained, and
    every one is timed"""
    world_size: WorldSize | None = None
    """number of ranks; null: that of `train`"""
    micro_batches: Annotated[tuple[Count, ...], AS_TUPLE, Field(min_length=1)] | None = None
    """some of `tune.micro_batches`; null: all that the ranks divide"""
    learning_rates: _Rates | None = None
    """some of `tune.learning_rates`; null: all"""
    lengths: int | None = Field(None, ge=0, le=10)
    """as `tune.lengths`; 0: its loss after the tokens of the first length alone; null: as there"""
    seeds: Annotated[tuple[Seed, ...], AS_TUPLE, Field(min_length=1)] | None = None
    """seeds, the first of which tunes and is that of the experiment; null: all of these"""

    @model_validator(mode="after")
    def _are_grids(self) -> Self:
        rates, numbers = self.learning_rates or (), self.micro_batches or ()
        if [*rates] != sorted({*rates}):
            raise ValueError("learning_rates must ascend")
        if len({*numbers}) < len(numbers):
            raise ValueError("micro_batches: two are the same: remove one")
        return self

    @property
    def restrictions(self) -> list[str]:
        """Names of the settings by which it is tuned over less than the others."""
        names = ("learning_rates", "micro_batches", "lengths")
        return [name for name in names if getattr(self, name) is not None]

    def ranks(self, train: Train) -> int:
        """Return the number of ranks."""
        return self.world_size or train.world_size

    def numbers(self, tune: Tune, train: Train) -> list[int]:
        """Return the numbers of micro-batches of a step, ascending."""
        wanted = self.micro_batches or tune.micro_batches
        return sorted(m for m in wanted if m % self.ranks(train) == 0)

    def first_rate(self, tune: Tune, train: Train) -> float:
        """Return the learning rate where the search begins: the nearest to that of `train`."""
        rates = self.learning_rates or tune.learning_rates
        return min(rates, key=lambda rate: abs(math.log(rate / train.learning_rate)))


def lengths_around(loss: float, losses: Mapping[int, float]) -> tuple[int, int] | None:
    """Return the two neighbours of several lengths that have a loss between theirs, the shorter
    first; None where no two have.

    Args:
        losses: by numbers of steps.
    """
    for (steps, above), (more, below) in itertools.pairwise(sorted(losses.items())):
        if above >= loss >= below and above > below:
            return steps, more
    return None
