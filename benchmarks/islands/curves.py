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
from benchmarks.islands.timing import Steps, stock_of, valid_timings, warm_step
from shardlab.config.timing_record import NO_COMMUNICATION, machine_name
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.core.interval import Ratio, interval_factor


class Mean(NamedTuple):
    """Mean of logarithms and half its interval; NaN for one value."""

    log: float
    half: float

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
        """Return the logarithm of the steps to the target's loss by seed; of other seeds than the
        first by what the loss of one length differs by. Empty where no two lengths have it between
        them."""
        if self.trained_as == target.name:
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
    """Step times on one link, as logarithms of ms, repetition by repetition.

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
    def ratio(self) -> float:
        """Communication of stock torch over computation: what `shardlab.probe` measures."""
        return self.over(self.stock, NO_COMMUNICATION).ratio - 1

    def over(self, strategy: str, other: str) -> Ratio:
        """Return the step of one micro-batch over that of another strategy."""
        logs = self._logs(self._at_once, strategy)
        return paired(logs, self._logs(self._at_once, other)).ratio

    def strategies(self) -> list[str]:
        """Return the strategies whose steps of one micro-batch were timed."""
        return [run for steps, run in self._runs if steps == self._at_once]

    def has(self, row: Row) -> bool:
        """Return whether the steps of a method were timed."""
        return all(timed in self._runs for timed in self._parts(row))

    def logs(self, row: Row) -> list[float]:
        """Return the mean step of a method that trains until the loss."""
        parts = self._parts(row)
        later = self._logs(*parts[0])
        if len(parts) == 1:
            return later
        sync = sync_of(row.name)
        assert sync is not None
        share = sync.warmup_steps / row.steps.ratio.ratio
        first = self._logs(*parts[1])
        return [
            math.log(share * math.exp(warm) + (1 - share) * math.exp(step))
            for warm, step in zip(first, later, strict=True)
        ]

    def computing(self, row: Row) -> float:
        """Return the share of the step of a method in which it computes."""
        steps = Steps(METHODS[row.name].world_size, METHODS[row.name].accumulation)
        return paired(self._logs(steps, NO_COMMUNICATION), self.logs(row)).ratio.ratio

    def seconds(self, row: Row) -> float:
        """Return the mean seconds to the loss."""
        return math.exp(row.steps.log + mean_of(finite(self.logs(row))).log) / 1e3

    def gain(self, row: Row, other: Row) -> Ratio:
        """Return the time to the loss of another method over that of a method: steps in pairs of
        seeds, their times in pairs of repetitions."""
        step = paired(self.logs(other), self.logs(row))
        steps = mean_of(
            [other.logs[seed] - row.logs[seed] for seed in row.logs if seed in other.logs]
        )
        # methods that share their runs have equal steps, whatever the number of seeds
        half = 0.0 if shares_runs(row, other) else steps.half
        return Mean(step.log + steps.log, math.hypot(step.half, half)).ratio

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

    def _logs(self, steps: Steps, strategy: str) -> list[float]:
        """Return the logarithms of the steps; not a number where the machine paused."""
        return [math.log(ms) for ms in self._runs[steps, strategy].measured_ms()]


def finite(logs: Sequence[float]) -> list[float]:
    """Return the values of repetitions in which the machine did not pause."""
    return [log for log in logs if math.isfinite(log)]


def paired(logs: Sequence[float], others: Sequence[float]) -> Mean:
    """Return the ratio of steps in pairs of repetitions."""
    return mean_of(finite([log - other for log, other in zip(logs, others, strict=True)]))


def shares_runs(row: Row, other: Row) -> bool:
    """Return whether two methods train the same samples in each step, so that one's runs are the
    other's."""
    first, second = (METHODS[name].same_as or name for name in (row.name, other.name))
    return first == second
