"""Performance model of training steps: fitted on some timed runs, then predicting others."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from shardlab.core.errors import UserError
from shardlab.experiment.link import bucket_bytes
from shardlab.forecast.bounds import (
    Bound,
    Speed,
    bounds_of,
    busy_cores,
    mean_compute,
    speed_of,
    standard_error,
    step_s,
)
from shardlab.forecast.coding import codings
from shardlab.forecast.costs import Costs, Measured
from shardlab.forecast.machine import Machine
from shardlab.forecast.step import obstacle, step_seconds
from shardlab.forecast.work import Compute, Overhead, Work
from shardlab.forecast.workload import Workload, case_of, strategy_of
from shardlab.measurements.calibration import UPDATE_BYTES, memory_operations
from shardlab.records.timing import NO_COMMUNICATION, TimedRun, UnitSize
from shardlab.strategy.strategy import CanonicalStrategy

_LONGEST_S = 0.1
"""upper bound of the engine overhead of one collective, seconds"""


class Engines(NamedTuple):
    """Overhead of an engine per collective, on top of the operation itself; fitted jointly."""

    work: dict[str, float]
    """CPU seconds per collective, by engine"""
    wait: float
    """seconds until the threads of all ranks have a core; a property of the machine"""
    covariance: tuple[tuple[float, ...], ...] = ()
    """of `work` in the order of the engines, then of `wait`"""
    noise: float = 0.0
    """standard deviation of measured minus modelled step time, seconds"""
    more: float = 0.0
    """added to the mean of `work` for engines that were never timed"""

    def scaled(self, factor: float) -> "Engines":
        """Return the overheads on a machine that is slower by a factor."""
        work = {name: factor * each for name, each in self.work.items()}
        covariance = tuple(tuple(factor**2 * each for each in row) for row in self.covariance)
        return self._replace(
            work=work, wait=factor * self.wait, more=factor * self.more, covariance=covariance
        )

    def of(self, engine: str) -> Overhead:
        """Return the overhead of an engine; of one that was never timed, the mean of the others."""
        known = self.work.get(engine)
        return Overhead(
            fmean(self.work.values()) + self.more if known is None else known, self.wait
        )


class Model(NamedTuple):
    """All fitted parameters of the performance model."""

    machine: Machine
    cores: float
    compute: dict[int, Compute]
    """of one rank that has its cores to itself, by the number of busy cores"""
    engines: Engines
    speed: Speed = Speed()
    """that everything above is at"""
    bounds: tuple[Bound, ...] = ()
    """that `speed` is fitted on"""
    fitted_compute: Mapping[int, Compute] = MappingProxyType({})
    """computation at speed 1"""

    def obstacle(self, strategy: CanonicalStrategy) -> str | None:
        """Return why the model cannot predict a canonical strategy, or None if it can."""
        if not self.engines.work:
            return "the model was fitted on no run of any engine"
        return unpredictable(strategy, self.machine)

    def without(self, timing: str) -> "Model":
        """Return the model with the computation and the drift that other timings tell."""
        others = tuple(bound for bound in self.bounds if bound.timing != timing)
        if len(others) in (0, len(self.bounds)):
            return self
        return self.at(speed_of(others, self.fitted_compute))._replace(bounds=others)

    def at(self, speed: Speed) -> "Model":
        """Return the model of a machine of another speed: transfers, codecs and waits need its
        cores as computation does."""
        factor = speed.mean / self.speed.mean
        return self._replace(
            machine=self.machine.scaled(factor),
            compute={busy: each.scaled(factor) for busy, each in self.compute.items()},
            engines=self.engines.scaled(factor),
            speed=speed,
        )

    def at_speed_of(self, compute: Compute, workload: Workload) -> "Model":
        """Return the model of a machine that computes a workload's step in the given times."""
        factor = sum(compute) / sum(self.computing(workload))
        model = self.at(Speed(factor * self.speed.mean))
        return model._replace(compute=dict.fromkeys(self.compute, compute))

    def predict(
        self, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
    ) -> float:
        """Predict the seconds of a step of a strategy that has no obstacle."""
        return step_seconds(self.work(strategy, units, workload), self.costs(workload))

    def work(
        self, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
    ) -> Work:
        """Return the work of one step of a strategy that has no obstacle."""
        return Work(
            strategy,
            tuple(unit.elements for unit in units),
            strategy.accumulation or workload.accumulation,
            self.computing(workload),
            self.engines.of(strategy.engine),
            *codings(strategy, self.machine),
            self._update_s(workload) if strategy.traits.residency == "streamed" else 0.0,
        )

    def _update_s(self, workload: Workload) -> float:
        """Return the seconds that AdamW takes to update the whole model."""
        return self.machine.memory["update"].at(UPDATE_BYTES * workload.parameters)

    def computing(self, workload: Workload) -> Compute:
        """Return the compute times fitted at the nearest number of busy cores."""
        busy = busy_cores(workload.world_size * workload.threads, self.cores)
        return self.compute[min(self.compute, key=lambda known: abs(known - busy))]

    def costs(self, workload: Workload) -> Costs:
        """Return the communication and memory costs for the ranks and the link of a workload."""
        kernel = workload.link_emulation == "namespaces"
        bits = workload.bits_per_second
        return Measured(
            self.machine,
            workload.world_size,
            self.cores / workload.threads,
            bits,
            workload.delay_s,
            bucket_bytes(bits) if kernel and bits is not None else 0.0,
            framed=kernel,
        )


def unpredictable(strategy: CanonicalStrategy, machine: Machine) -> str | None:
    """Return why a canonical strategy cannot be simulated, or None if it can."""
    if missing := obstacle(strategy):
        return f"the model does not support {missing}"
    try:
        codings(strategy, machine)
    except KeyError:
        return "its codec was not calibrated"
    if set(memory_operations(strategy)).difference(machine.memory):
        return "the memory that it moves was not calibrated"
    return None


def fit_model(machine: Machine, known: Sequence[TimedRun]) -> Model:
    """Fit the model on known runs, among them runs without communication.

    Raises:
        UserError: there is no run without communication, or one that cannot be simulated.
    """
    cores = float(known[0].host["cores"])
    bounds = bounds_of(known, cores)
    if not bounds:
        raise UserError("forecast.timings: none of them has steps without communication")
    fitted = [run for run in known if run.run != NO_COMMUNICATION]
    for run in fitted:
        if why := unpredictable(strategy_of(run), machine):
            raise UserError(f"forecast.runs: {run.run}: {why}: name another run")
    names = dict.fromkeys(strategy_of(run).engine for run in fitted)
    timings = {run.timing for run in fitted}
    own = [bound for bound in bounds if bound.timing in timings]
    compute = mean_compute(own or bounds)
    model = Model(
        machine,
        cores,
        compute,
        Engines(dict.fromkeys(names, 0.0), 0.0),
        bounds=bounds,
        fitted_compute=compute,
    )
    if fitted:
        computes = {bound.timing: bound.compute for bound in own}
        model = model._replace(engines=_engines(model, fitted, computes))
    return model.at(speed_of(bounds, compute))


def _engines(model: Model, runs: Sequence[TimedRun], own: Mapping[str, Compute]) -> Engines:
    """Fit the overhead per collective by least squares of absolute errors.

    Not of relative errors: waits of some milliseconds are as likely in a short step as in a long
    one.

    Args:
        own: compute times of each timing, so that what drifts between timings is no overhead.
    """
    names = [*model.engines.work]
    cases = []
    for run in runs:
        case = case_of(run)
        work = model.work(*case)
        work = work._replace(compute=own.get(run.timing, work.compute))
        cases.append((work, model.costs(case.workload), step_s(run)))

    def misfit(given: Sequence[float]) -> list[float]:
        *each, wait = given
        overhead = {name: Overhead(s, wait) for name, s in zip(names, each, strict=True)}
        return [
            step_seconds(work._replace(overhead=overhead[work.strategy.engine]), costs) - measured
            for work, costs, measured in cases
        ]

    start = [1e-4] * (len(names) + 1)
    found = least_squares(misfit, start, bounds=(0.0, _LONGEST_S), x_scale=1e-3)
    unexplained = 2 * found.cost / max(len(cases) - len(start), 1)
    # as few runs as unknowns fit perfectly, yet are no more certain than their repetitions
    chance = np.mean([(standard_error(run.step_ms) * step_s(run)) ** 2 for run in runs])
    variance = max(unexplained, float(chance))
    covariance = variance * np.linalg.pinv(found.jac.T @ found.jac)
    *each, wait = map(float, found.x)
    return Engines(
        dict(zip(names, each, strict=True)),
        wait,
        tuple(map(tuple, covariance.tolist())),
        variance**0.5,
    )
