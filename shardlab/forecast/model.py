"""Performance model of training steps: fitted on some timed runs, then predicting others."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from shardlab.core.errors import UserError
from shardlab.experiment.link import bucket_bytes
from shardlab.forecast.costs import Costs, Measured, codings
from shardlab.forecast.machine import Machine
from shardlab.forecast.step import obstacle, step_seconds
from shardlab.forecast.work import Compute, Overhead, Work
from shardlab.measurements.calibration import UPDATE_BYTES, memory_operations
from shardlab.records.timing import NO_COMMUNICATION, TimedRun
from shardlab.strategy.strategy import CanonicalStrategy, parse_strategy

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


class Model(NamedTuple):
    """All fitted parameters of the performance model."""

    machine: Machine
    cores: float
    compute: dict[int, Compute]
    """of one rank that has its cores to itself, by the number of busy cores"""
    compute_error: float
    """relative standard error of `compute`"""
    engines: Engines

    def work(self, run: TimedRun, strategy: CanonicalStrategy) -> Work:
        """Return the work of one step of a run that `Model.obstacle` accepts."""
        return Work(
            strategy,
            tuple(unit.elements for unit in run.units),
            strategy.accumulation or run.accumulation,
            self.computing(run),
            Overhead(self.engines.work[strategy.engine], self.engines.wait),
            *codings(strategy, self.machine),
            self._update_s(run) if strategy.traits.residency == "streamed" else 0.0,
        )

    def _update_s(self, run: TimedRun) -> float:
        """Return the seconds that AdamW takes to update the whole model."""
        return self.machine.memory["update"].at(UPDATE_BYTES * run.parameters)

    def obstacle(self, run: TimedRun) -> str | None:
        """Return why the model cannot predict a run, or None if it can."""
        strategy = strategy_of(run)
        if strategy.engine not in self.engines.work:
            return f"the model was fitted on no run of {strategy.engine}"
        return unpredictable(strategy, self.machine)

    def predict(self, run: TimedRun) -> float:
        """Predict the seconds of a step of a run; reads the configuration of the run only."""
        return step_seconds(self.work(run, strategy_of(run)), self.costs(run))

    def computing(self, run: TimedRun) -> Compute:
        """Return the compute times fitted at the nearest number of busy cores."""
        busy = _busy(run, self.cores)
        return self.compute[min(self.compute, key=lambda known: abs(known - busy))]

    def costs(self, run: TimedRun) -> Costs:
        """Return the communication and memory costs for the ranks and the link of a run."""
        kernel = run.link_emulation == "namespaces"
        bits = run.bits_per_second
        return Measured(
            self.machine,
            run.world_size,
            self.cores / run.threads,
            bits,
            run.delay_ms / 1e3,
            bucket_bytes(bits) if kernel and bits is not None else 0.0,
            framed=kernel,
        )


def strategy_of(run: TimedRun) -> CanonicalStrategy:
    """Return the canonical form of a run's strategy."""
    return parse_strategy(run.strategy, f"strategy of {run.run}").canonical()


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


def step_s(run: TimedRun) -> float:
    """Return the measured step time in seconds: the median of the repetitions."""
    return median(run.step_ms) / 1e3


def fit_model(machine: Machine, known: Sequence[TimedRun]) -> Model:
    """Fit the model on known runs, among them runs without communication.

    Raises:
        UserError: there is no run without communication, or one that cannot be simulated.
    """
    alone = [run for run in known if run.run == NO_COMMUNICATION]
    if not alone:
        raise UserError("forecast.timings: none of them has steps without communication")
    cores = float(known[0].host["cores"])
    computes: dict[int, list[Compute]] = {}
    for run in alone:
        computes.setdefault(_busy(run, cores), []).append(fit_compute(run, cores))
    error = float(np.mean([_standard_error(run.step_ms) for run in alone]))
    means = {busy: _mean(each) for busy, each in computes.items()}
    fitted = [run for run in known if run.run != NO_COMMUNICATION]
    for run in fitted:
        if why := unpredictable(strategy_of(run), machine):
            raise UserError(f"forecast.runs: {run.run}: {why}: name another run")
    names = dict.fromkeys(strategy_of(run).engine for run in fitted)
    model = Model(machine, cores, means, error, Engines(dict.fromkeys(names, 0.0), 0.0))
    return model._replace(engines=_engines(model, fitted)) if fitted else model


def _busy(run: TimedRun, cores: float) -> int:
    return round(min(run.world_size * run.threads, cores))


def _mean(computes: Sequence[Compute]) -> Compute:
    return Compute(*(sum(each) / len(computes) for each in zip(*computes, strict=True)))


def fit_compute(run: TimedRun, cores: float) -> Compute:
    """Return the compute times of one rank that has its cores to itself, from ranks that share
    them.

    Traced steps say how a step is divided, the others how long it is.
    """
    traced = run.breakdown
    parts = Compute(traced.forward_ms, traced.backward_ms, traced.update_ms)
    share = min(1.0, cores / (run.world_size * run.threads))
    return parts.scaled(share * step_s(run) / sum(parts))


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median relative to it: 1.25 times that of a normal mean."""
    if len(values) < 2:
        return 0.0
    return float(1.25 * np.std(values, ddof=1) / len(values) ** 0.5 / np.median(values))


def _engines(model: Model, runs: Sequence[TimedRun]) -> Engines:
    """Fit the overhead per collective by least squares of absolute errors.

    Not of relative errors: waits of some milliseconds are as likely in a short step as in a long
    one.
    """
    names = [*model.engines.work]
    cases = [(model.work(run, strategy_of(run)), model.costs(run), step_s(run)) for run in runs]

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
    chance = np.mean([(_standard_error(run.step_ms) * step_s(run)) ** 2 for run in runs])
    variance = max(unexplained, float(chance))
    covariance = variance * np.linalg.pinv(found.jac.T @ found.jac)
    *each, wait = map(float, found.x)
    return Engines(
        dict(zip(names, each, strict=True)),
        wait,
        tuple(map(tuple, covariance.tolist())),
        variance**0.5,
    )
