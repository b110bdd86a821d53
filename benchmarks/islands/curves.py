"""Losses of the methods by steps, steps to a loss, and step times, from the records."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.islands.methods import (
    FOLDER,
    METHODS,
    TARGET,
    TARGET_STEPS,
    parameters,
    steps_of_equal_tokens,
    strategies,
    sync_of,
    timed_as,
)
from benchmarks.islands.timing import Steps, stock_of, valid_timings, warm_step
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.results.interval import Ratio, geometric_mean, paired_ratio
from shardlab.results.timing_result import NO_COMMUNICATION, machine_name


class Length(NamedTuple):
    """Steps of a run that ends at a loss, and the change of their logarithm per nat."""

    shorter: int
    """steps of the shorter of the two runs that have the loss between them"""
    steps: float
    per_nat: float


def length_at(loss: float, losses: Mapping[int, float]) -> Length | None:
    """Return the length of the run that would end at a loss, by those of runs of several lengths.

    Returns:
        None where no two neighbours have it between them.
    """
    for (steps, above), (more, below) in itertools.pairwise(sorted(losses.items())):
        if above >= loss >= below and above > below:
            per_nat = math.log(more / steps) / (above - below)
            return Length(steps, steps * math.exp((above - loss) * per_nat), per_nat)
    return None


def records_of(name: str, folder: str = "runs") -> list[dict[str, Any]]:
    """Return the records of the runs of a method.

    Raises:
        UserError: one has another strategy than params/islands.yaml.
    """
    strategy = strategies()[METHODS[name].strategy]
    records = []
    for path in sorted((FOLDER / folder / name).glob("*.json")):
        records.append(read_json(path, "remove it"))
        if records[-1]["strategy_hash"] != strategy.hash():
            raise UserError(f"{path}: of another strategy than params/islands.yaml: train again")
    return records


class Curve:
    """Losses of a method by steps and seed, at its tuned learning rate."""

    def __init__(self, name: str) -> None:
        self.name, self.method = name, METHODS[name]
        self.trained_as = self.method.same_as or name
        """method whose runs these are"""
        self.tuned_as = METHODS[self.trained_as].tuned_as or self.trained_as
        """method whose learning rate these have"""
        self.tuning = {
            record["learning_rate"]: record["val_loss"]
            for record in records_of(self.tuned_as)
            if (record["steps"], record["seed"]) == (METHODS[self.tuned_as].steps, 0)
        }
        """losses of the first seed by the learning rates that were tried"""
        self.rate = min(self.tuning, key=self.tuning.__getitem__)
        self.records: dict[int, dict[int, dict[str, Any]]] = {}
        for record in records_of(self.trained_as):
            if record["learning_rate"] == self.rate:
                self.records.setdefault(record["seed"], {})[record["steps"]] = record

    def loss(self, seed: int, steps: int) -> float | None:
        """Return the validation loss of a run; None where it was not trained."""
        record = self.records.get(seed, {}).get(steps)
        return None if record is None else record["val_loss"]

    def mean_bytes(self) -> float:
        """Return the bytes that a rank sends in a step of runs of as many tokens as the target, or
        of all runs if there is none; of one device 0."""
        if self.method.world_size == 1:
            return 0.0
        steps = steps_of_equal_tokens(self.name, TARGET_STEPS)
        records = [record for at in self.records.values() for record in at.values()]
        equal = [record for record in records if record["steps"] == steps]
        return float(np.mean([record["bytes_wire"] for record in equal or records]))

    def steps_to(self, target: "Curve") -> dict[int, float]:
        """Return the steps to the target's loss by seed; of other seeds than the first by what the
        loss of one length differs by. Empty where no two lengths have it between them."""
        if self.trained_as == target.name:
            return dict.fromkeys(self.records, float(TARGET_STEPS))
        reached = target.loss(0, TARGET_STEPS)
        losses = {steps: record["val_loss"] for steps, record in self.records.get(0, {}).items()}
        length = None if reached is None else length_at(reached, losses)
        if reached is None or length is None:
            return {}
        steps_by_seed = {}
        for seed in self.records:
            baseline, loss = target.loss(seed, TARGET_STEPS), self.loss(seed, length.shorter)
            if baseline is not None and loss is not None:
                worse = (loss - baseline) - (losses[length.shorter] - reached)
                steps_by_seed[seed] = length.steps * math.exp(worse * length.per_nat)
        return steps_by_seed

    def perplexity_over(self, target: "Curve", target_steps: int = TARGET_STEPS) -> Ratio | None:
        """Return the perplexity over the target's after the tokens of so many steps of the target,
        in pairs of seeds; None if unknown."""
        steps = steps_of_equal_tokens(self.name, target_steps)
        pairs = [
            (math.exp(loss), math.exp(baseline))
            for seed in self.records
            if (loss := self.loss(seed, steps)) is not None
            and (baseline := target.loss(seed, target_steps)) is not None
        ]
        return paired_ratio(*zip(*pairs, strict=True)) if pairs else None


class Row(NamedTuple):
    """A method that reaches the loss, with the engine that would run it."""

    name: str
    engine: str | None
    steps: Mapping[int, float]
    """to the loss, by seed"""

    @property
    def mean_steps(self) -> float:
        """Geometric mean of the steps over the seeds."""
        return geometric_mean([*self.steps.values()]).ratio

    @property
    def title(self) -> str:
        """Name in tables."""
        if self.engine is None:
            return self.name
        return self.name.replace(TARGET, self.engine)


class LinkTimes:
    """Step times on one link, in ms, repetition by repetition.

    All timings of a link have the same repetitions, in turns. So ratios are of pairs: what slows a
    repetition down slows both.
    """

    def __init__(self, name: str) -> None:
        self.name, self.stock = name, stock_of(name)
        self._runs = valid_timings(parameters(), name)
        self._at_once = max(steps for steps, _ in self._runs)._replace(accumulation=1)
        """steps of all ranks with one micro-batch"""

    @property
    def machine(self) -> str:
        """Host and software of the timing."""
        run = next(iter(self._runs.values()))
        return machine_name(run.host, run.torch)

    @property
    def stock_over_bound(self) -> Ratio:
        """Step of stock torch over one without communication."""
        return self.over(self.stock, NO_COMMUNICATION)

    @property
    def ratio(self) -> float:
        """Synchronisation over computation: how much longer the step of stock torch is."""
        return self.stock_over_bound.ratio - 1

    def over(self, strategy: str, other: str) -> Ratio:
        """Return the step of one micro-batch over that of another strategy."""
        return paired_ratio(*(self._measured(self._at_once, name) for name in (strategy, other)))

    def strategies(self) -> list[str]:
        """Return the strategies whose steps of one micro-batch were timed."""
        return [run for steps, run in self._runs if steps == self._at_once]

    def has(self, row: Row) -> bool:
        """Return whether the steps of a method were timed."""
        return all(timed in self._runs for timed in self._parts(row))

    def step_ms(self, row: Row) -> list[float]:
        """Return the mean step of a method that trains until the loss; NaN where the machine
        paused."""
        later, *first = (self._measured(*part) for part in self._parts(row))
        if not first:
            return later
        sync = sync_of(row.name)
        assert sync is not None
        share = sync.warmup_steps / row.mean_steps
        return [share * warm + (1 - share) * step for warm, step in zip(*first, later, strict=True)]

    def seconds(self, row: Row) -> float:
        """Return the mean seconds to the loss."""
        return row.mean_steps * geometric_mean(self.step_ms(row)).ratio / 1e3

    def gain(self, row: Row, other: Row) -> Ratio:
        """Return the time to the loss of another method over that of a method: steps in pairs of
        seeds, their times in pairs of repetitions."""
        step = paired_ratio(self.step_ms(other), self.step_ms(row))
        if shares_runs(row, other):  # equal steps, whatever the number of seeds
            return step
        pairs = [(other.steps[seed], row.steps[seed]) for seed in row.steps if seed in other.steps]
        return step.times(paired_ratio(*zip(*pairs, strict=True)))

    def _parts(self, row: Row) -> list[tuple[Steps, str]]:
        """Return what was timed of a method: its step, and that of its warm-up if it has one."""
        method, sync = METHODS[row.name], sync_of(row.name)
        steps = Steps(method.world_size, method.accumulation)
        if method.world_size == 1:
            return [(steps, NO_COMMUNICATION)]
        parts = [(steps, timed_as(row.engine or method.strategy))]
        if sync is not None and sync.warmup_steps:
            parts.append((self._at_once, warm_step(self.name)))
        return parts

    def _measured(self, steps: Steps, strategy: str) -> list[float]:
        """Return the steps in ms; NaN where the machine paused."""
        return self._runs[steps, strategy].measured_ms()


def shares_runs(row: Row, other: Row) -> bool:
    """Return whether two methods train the same samples in each step, so that one's runs are the
    other's."""
    first, second = (METHODS[name].same_as or name for name in (row.name, other.name))
    return first == second
