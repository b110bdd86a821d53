"""Losses of tuned methods by steps, and the steps to one loss, from the rows of `tune`.

Every run has its own end of the learning rate, so a loss belongs to a length. With the first seed
the loss to reach lies between those of two lengths, and its length is interpolated in log steps;
what other seeds differ by at one of these lengths moves theirs along the same slope.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from shardlab.results.interval import Ratio, paired_ratio
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import Strategy
from shardlab.train.settings import Train
from shardlab.train.tune_settings import Method, Tune, lengths_around

_T = TypeVar("_T")


class Length(NamedTuple):
    """Steps of the run that would end at a loss, and the change of their logarithm per nat."""

    around: tuple[int, int]
    """the two lengths that have the loss between them, the shorter first"""
    steps: float
    per_nat: float


def length_at(loss: float, losses: Mapping[int, float]) -> Length | None:
    """Return the length of the run that would end at a loss, by the losses of several lengths.

    Returns:
        None where no two neighbours have it between them.
    """
    around = lengths_around(loss, losses)
    if around is None:
        return None
    steps, more = around
    per_nat = math.log(more / steps) / (losses[steps] - losses[more])
    return Length(around, steps * math.exp((losses[steps] - loss) * per_nat), per_nat)


@dataclass(frozen=True)
class Tuned:
    """Tuned methods, and the runs that tuned them."""

    tune: Tune
    methods: Mapping[str, Method]
    strategies: Mapping[str, Strategy]
    """by name, at least those of the methods"""
    train: Train
    seeds: Sequence[int]
    """of methods that name none"""
    baseline: str
    """strategy whose quality the others are compared with"""
    rows: Sequence[TuneResult]

    @cached_property
    def curves(self) -> "list[Curve]":
        """Every method with each of its numbers of micro-batches."""
        return [
            Curve(self, name, number)
            for name, method in self.methods.items()
            for number in method.numbers(self.tune, self.train)
        ]

    @cached_property
    def listed(self) -> "list[Curve]":
        """The curves, those that compete first."""
        return sorted(self.curves, key=lambda curve: not curve.competes)

    @cached_property
    def stock(self) -> "Curve | None":
        """The method of the baseline, on the ranks and with the micro-batches of `train`."""
        ranks = self.train.world_size
        setting = ranks, ranks * self.train.accumulation
        same = (
            curve
            for curve in self.curves
            if self.baseline in curve.method.strategies
            and (curve.ranks, curve.micro_batches) == setting
        )
        return next(same, None)

    def perplexity(self, curve: "Curve") -> Ratio | None:
        """Return the perplexity over that of the stock method after the tokens of a run of `train`;
        None if unknown."""
        stock = self.stock
        return None if stock is None else curve.perplexity_over(stock, stock.equal_steps)

    def has_all_numbers(self, strategy: Strategy, ranks: int) -> bool:
        """Return whether methods of a strategy have all numbers of micro-batches that so many ranks
        divide."""
        same = [curve for curve in self.curves if curve.strategy.hash() == strategy.hash()]
        numbers = {number for number in self.tune.micro_batches if number % ranks == 0}
        return numbers <= {curve.micro_batches for curve in same}

    @property
    def reached(self) -> bool:
        """True if any method reaches the loss."""
        return any(curve.steps for curve in self.curves)


class Curve:
    """Losses of a method with so many micro-batches, by steps and seed, at its best settings."""

    def __init__(self, tuned: Tuned, name: str, micro_batches: int) -> None:
        tune, train = tuned.tune, tuned.train
        self.name, self.micro_batches, self.method = name, micro_batches, tuned.methods[name]
        self.ranks = self.method.ranks(train)
        self.strategy = tuned.strategies[self.method.strategies[0]]
        """the one that was trained"""
        self.equal_steps = tune.equal_steps(micro_batches, train)
        """steps that see the tokens of a run of `train`"""
        self._tuned = tuned
        rows = [r for r in tuned.rows if (r.run, r.micro_batches) == (name, micro_batches)]
        self.first_seed = (self.method.seeds or tuned.seeds)[0]
        tried = self.first_seed, tune.first_steps(micro_batches, train)
        self.tries = {
            (row.learning_rate, row.betas): math.inf if row.val_loss is None else row.val_loss
            for row in rows
            if (row.seed, row.steps) == tried
        }
        """losses by the learning rates and betas that were tried"""
        self.best = min(self.tries, key=self.tries.__getitem__, default=None)
        self.runs: dict[int, dict[int, TuneResult]] = {}
        """at the best of them, by seed and steps"""
        for row in rows:
            if (row.learning_rate, row.betas) == self.best:
                self.runs.setdefault(row.seed, {})[row.steps] = row
        self.steps = self._steps_to(tune.target_loss)
        """to the loss, by seed; empty where no two lengths have it between them"""

    def losses(self, seed: int) -> dict[int, float]:
        """Return the losses of a seed by steps, without runs that diverged."""
        runs = self.runs.get(seed, {}).items()
        return {steps: run.val_loss for steps, run in runs if run.val_loss is not None}

    def _steps_to(self, loss: float) -> dict[int, float]:
        first = self.losses(self.first_seed)
        length = length_at(loss, first)
        if length is None:
            return {}
        steps = {}
        for seed in self.runs:
            losses = self.losses(seed)
            shared = next((steps for steps in length.around if steps in losses), None)
            if shared is not None:
                worse = losses[shared] - first[shared]
                steps[seed] = length.steps * math.exp(worse * length.per_nat)
        return steps

    def mean_bytes(self) -> float:
        """Return the bytes that a rank sends in a step of runs of equal tokens, or of all runs if
        there is none."""
        runs = [run for of_seed in self.runs.values() for run in of_seed.values()]
        equal = [run for run in runs if run.steps == self.equal_steps]
        return float(np.mean([run.bytes_wire for run in equal or runs])) if runs else math.nan

    def perplexity_over(self, stock: "Curve", stock_steps: int) -> Ratio | None:
        """Return the perplexity over that of the stock method after the tokens of so many of its
        steps, in pairs of seeds; None if unknown."""
        steps = stock_steps * stock.micro_batches // self.micro_batches
        pairs = [
            (math.exp(losses[steps]), math.exp(baseline[stock_steps]))
            for seed in self.runs
            if steps in (losses := self.losses(seed))
            and stock_steps in (baseline := stock.losses(seed))
        ]
        return paired_ratio(*zip(*pairs, strict=True)) if pairs else None

    @property
    def unbracketed(self) -> list[str]:
        """Open ends of the search, in words; empty where both neighbours of the best setting
        were tried on each axis."""
        if self.best is None:
            return ["nothing was tried"]
        rates, betas = self._tuned.tune.grid(self._tuned.train)
        allowed = self.method.learning_rates or rates
        rate, decays = self.best
        left = []
        if len(allowed) > 1 and rate in (rates[0], rates[-1]):
            left.append("the learning rate is at an end of the grid")
        near = [(other, decays) for other in _neighbours(allowed, rate)]
        near += [(rate, other) for other in _neighbours(betas, decays)]
        if any(setting not in self.tries for setting in near):
            left.append("not all neighbours were tried")
        return left

    @property
    def too_soon(self) -> bool:
        """True if it has the loss in its shortest run that has any, so that its steps to it are not
        known."""
        losses = self.losses(self.first_seed).values()
        return not self.steps and max(losses, default=math.inf) < self._tuned.tune.target_loss

    @property
    def less(self) -> list[str]:
        """Names of the settings by which it was tuned over less than others. Micro-batches that
        another method of the same strategy has are no less."""
        names = self.method.restrictions
        if "micro_batches" in names and self._tuned.has_all_numbers(self.strategy, self.ranks):
            names.remove("micro_batches")
        return names

    @property
    def competes(self) -> bool:
        """True if it had the tries of the others at each of its numbers of micro-batches. With more
        numbers it could only be faster: where it is the fastest it is so in any case, and a gain
        over it is an upper limit."""
        return {*self.less} <= {"micro_batches"}


def _neighbours(values: Sequence[_T], value: _T) -> Sequence[_T]:
    """Return the values beside one."""
    if value not in values:
        return ()
    at = values.index(value)
    return [*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]]
