"""Losses of the methods by steps, steps to a loss, and step times, from the records."""

import itertools
import math
from collections.abc import Mapping, Sequence
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
from benchmarks.islands.timing import stock_of, valid_timings, warm_step
from shardlab.config.timing_record import NO_COMMUNICATION, machine_name
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.core.interval import Ratio, interval_factor


class Mean(NamedTuple):
    """Mean of logarithms and half its interval; NaN for one value."""

    log: float
    half: float

    def over(self, other: "Mean") -> "Mean":
        """Return the ratio of two independent means."""
        return Mean(self.log - other.log, math.hypot(self.half, other.half))

    @property
    def ratio(self) -> Ratio:
        """The mean as a factor."""
        ends = math.exp(self.log - self.half), math.exp(self.log + self.half)
        return Ratio(math.exp(self.log), *ends)


def mean_of(logs: Sequence[float]) -> Mean:
    """Return the mean with Student's interval."""
    deviation = float(np.std(logs, ddof=1)) if len(logs) > 1 else math.nan
    return Mean(float(np.mean(logs)), interval_factor(len(logs)) * deviation)


class Length(NamedTuple):
    """Logarithm of the steps of a run that ends at a loss, and its change per nat."""

    shorter: int
    """steps of the shorter of the two runs that have the loss between them"""
    log: float
    per_nat: float


def length_at(loss: float, losses: Mapping[int, float]) -> Length | None:
    """Return the length of the run that would end at a loss, by those of runs of several lengths.

    Returns:
        None where no two neighbours have it between them.
    """
    for (steps, above), (more, below) in itertools.pairwise(sorted(losses.items())):
        if above >= loss >= below and above > below:
            per_nat = math.log(more / steps) / (above - below)
            return Length(steps, math.log(steps) + (above - loss) * per_nat, per_nat)
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
        own = self.method.tuned_as or name
        self.tuning = {
            record["learning_rate"]: record["val_loss"]
            for record in records_of(own)
            if (record["steps"], record["seed"]) == (METHODS[own].steps, 0)
        }
        """losses of the first seed by the learning rates that were tried"""
        self.rate = min(self.tuning, key=self.tuning.__getitem__)
        self.records: dict[int, dict[int, dict[str, Any]]] = {}
        for record in records_of(name):
            if record["learning_rate"] == self.rate:
                self.records.setdefault(record["seed"], {})[record["steps"]] = record

    def loss(self, seed: int, steps: int) -> float | None:
        """Return the validation loss of a run; None where it was not trained."""
        record = self.records.get(seed, {}).get(steps)
        return None if record is None else record["val_loss"]

    def mean_bytes(self) -> float:
        """Return the bytes that a rank sends in a step of runs of as many tokens as the target, or
        of all runs if there is none."""
        steps = steps_of_equal_tokens(self.name, TARGET_STEPS)
        records = [record for at in self.records.values() for record in at.values()]
        equal = [record for record in records if record["steps"] == steps]
        return float(np.mean([record["bytes_wire"] for record in equal or records]))

    def steps_to(self, target: "Curve") -> dict[int, float]:
        """Return the logarithm of the steps to the target's loss by seed; of other seeds than the
        first by what the loss of one length differs by. Empty where no two lengths have it between
        them."""
        if self.name == target.name:
            return dict.fromkeys(self.records, math.log(TARGET_STEPS))
        reached = target.loss(0, TARGET_STEPS)
        losses = {steps: record["val_loss"] for steps, record in self.records.get(0, {}).items()}
        length = None if reached is None else length_at(reached, losses)
        if reached is None or length is None:
            return {}
        found = {}
        for seed in self.records:
            other, own = target.loss(seed, TARGET_STEPS), self.loss(seed, length.shorter)
            if other is not None and own is not None:
                worse = (own - other) - (losses[length.shorter] - reached)
                found[seed] = length.log + worse * length.per_nat
        return found

    def perplexity_over(self, target: "Curve", target_steps: int = TARGET_STEPS) -> Ratio | None:
        """Return the perplexity over the target's after the tokens of so many steps of the target,
        in pairs of seeds; None if unknown."""
        steps = steps_of_equal_tokens(self.name, target_steps)
        logs = [
            mine - other
            for seed in self.records
            if (mine := self.loss(seed, steps)) is not None
            and (other := target.loss(seed, target_steps)) is not None
        ]
        return mean_of(logs).ratio if logs else None


class Row(NamedTuple):
    """A method that reaches the loss, with the engine that would run it."""

    name: str
    engine: str | None
    logs: Mapping[int, float]
    """logarithm of the steps by seed"""

    @property
    def steps(self) -> Mean:
        """Mean steps."""
        return mean_of([*self.logs.values()])

    @property
    def title(self) -> str:
        """Name in tables."""
        if self.engine is None:
            return self.name
        return self.name.replace(TARGET, self.engine)


class LinkTimes:
    """Step times on one link, ms, repetition by repetition."""

    def __init__(self, name: str) -> None:
        self.name, self.stock = name, stock_of(name)
        self._runs = valid_timings(parameters(), name)
        self.compute = self.step(NO_COMMUNICATION, 1)

    @property
    def machine(self) -> str:
        """Host and software of the timing."""
        run = next(iter(self._runs.values()))
        return machine_name(run.host, run.torch)

    @property
    def ratio(self) -> float:
        """Synchronisation of stock torch over computation."""
        return self.step(self.stock, 1).over(self.compute).ratio.ratio - 1

    def step(self, strategy: str, accumulation: int) -> Mean:
        """Return the mean step, ms."""
        logs = self._logs(strategy, accumulation)
        return mean_of([log for log in logs if math.isfinite(log)])

    def _logs(self, strategy: str, accumulation: int) -> list[float]:
        """Return the logarithms of the steps; not a number where the machine paused."""
        return [math.log(ms) for ms in self._runs[accumulation, strategy].measured_ms()]

    def over(self, strategy: str, other: str) -> Ratio:
        """Return the step over that of another strategy in the same repetitions."""
        pairs = zip(self._logs(strategy, 1), self._logs(other, 1), strict=True)
        return mean_of([one - other for one, other in pairs if math.isfinite(one - other)]).ratio

    def strategies(self) -> list[str]:
        """Return the strategies whose steps of one micro-batch were timed."""
        return [run for accumulation, run in self._runs if accumulation == 1]

    def has(self, row: Row) -> bool:
        """Return whether the steps of a method were timed."""
        method = METHODS[row.name]
        if method.world_size == 1:
            return True
        needed = [(method.accumulation, timed_as(row.engine or method.strategy))]
        sync = sync_of(row.name)
        if sync is not None and sync.warmup_steps:
            needed.append((1, warm_step(self.name)))
        return all(each in self._runs for each in needed)

    def of(self, row: Row) -> Mean:
        """Return the mean step of a method that trains until the loss, ms."""
        method = METHODS[row.name]
        if method.world_size == 1:
            return self.compute
        strategy = row.engine or method.strategy
        later = self.step(timed_as(strategy), method.accumulation)
        sync = sync_of(row.name)
        if sync is None or not sync.warmup_steps:
            return later
        first = self.step(warm_step(self.name), 1)
        steps = row.steps.ratio.ratio
        warm = sync.warmup_steps / steps * math.exp(first.log)
        rest = (1 - sync.warmup_steps / steps) * math.exp(later.log)
        half = math.hypot(warm * first.half, rest * later.half) / (warm + rest)
        return Mean(math.log(warm + rest), half)

    def seconds(self, row: Row) -> float:
        """Return the mean seconds to the loss."""
        return math.exp(row.steps.log + self.of(row).log) / 1e3

    def gain(self, row: Row, other: Row) -> Ratio:
        """Return the time to the loss of another method over that of a method: steps in pairs of
        seeds."""
        step = self.of(other).over(self.of(row))
        steps = mean_of(
            [other.logs[seed] - row.logs[seed] for seed in row.logs if seed in other.logs]
        )
        return Mean(step.log + steps.log, math.hypot(step.half, steps.half)).ratio
