"""The model of a set of training runs: what it learns from some, what it says of others."""

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
from shardlab.measurements.timing import NO_COMMUNICATION, TimedRun
from shardlab.strategy.strategy import Strategy, parse_strategy

_LONGEST_S = 0.1
"""of the engine's own work for one collective"""


class Engines(NamedTuple):
    """What engines take for each collective, beside the operation itself; learnt together."""

    work: dict[str, float]
    """seconds of the processor, by engine"""
    wait: float
    """seconds until the threads of all ranks have a core: a matter of the machine"""
    covariance: tuple[tuple[float, ...], ...] = ()
    """of the work in the order of the engines, then of the wait"""
    noise: float = 0.0
    """seconds that measured steps differ from the model: their standard deviation"""


class Model(NamedTuple):
    """Everything that was learnt."""

    machine: Machine
    cores: float
    compute: dict[int, Compute]
    """of one rank that has its cores for itself, by the number of cores that are busy"""
    compute_error: float
    """relative standard error of `compute`"""
    engines: Engines

    def work(self, run: TimedRun, strategy: Strategy) -> Work:
        """The step of a run to which nothing stands in the way (`Model.obstacle`)."""
        return Work(
            strategy,
            tuple(unit.elements for unit in run.units),
            strategy.accumulation or run.accumulation,
            self.computing(run),
            Overhead(self.engines.work[strategy.engine], self.engines.wait),
            *codings(strategy, self.machine),
            self._update_s(run) if strategy.engine == "slide" else 0.0,
        )

    def _update_s(self, run: TimedRun) -> float:
        """What AdamW takes for a whole model."""
        return self.machine.memory["update"].at(UPDATE_BYTES * run.parameters)

    def obstacle(self, run: TimedRun) -> str | None:
        """Why the model has nothing to say of a run; None if it has."""
        strategy = strategy_of(run)
        if strategy.engine not in self.engines.work:
            return f"the model has learnt from no run of {strategy.engine}"
        return cannot_learn(strategy, self.machine)

    def predict(self, run: TimedRun) -> float:
        """Seconds of a step of a run, of which nothing but its setting is read."""
        return step_seconds(self.work(run, strategy_of(run)), self.costs(run))

    def computing(self, run: TimedRun) -> Compute:
        """What was learnt of the nearest number of busy cores: they share caches and memory."""
        busy = _busy(run, self.cores)
        return self.compute[min(self.compute, key=lambda known: abs(known - busy))]

    def costs(self, run: TimedRun) -> Costs:
        """Of the run's ranks and link."""
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


def strategy_of(run: TimedRun) -> Strategy:
    """In its canonical form."""
    return parse_strategy(run.strategy, f"strategy of {run.run}").canonical()


def cannot_learn(strategy: Strategy, machine: Machine) -> str | None:
    """Why a strategy in its canonical form cannot be simulated; None if it can."""
    if missing := obstacle(strategy):
        return f"the model does not know {missing}"
    try:
        codings(strategy, machine)
    except KeyError:
        return "its codec was not calibrated"
    if set(memory_operations(strategy)).difference(machine.memory):
        return "the memory that it moves was not calibrated"
    return None


def step_s(run: TimedRun) -> float:
    """Measured: the median of the rounds."""
    return median(run.step_ms) / 1e3


def learn_model(machine: Machine, known: Sequence[TimedRun]) -> Model:
    """The model of known runs, among them those without communication.

    Raises:
        UserError: there is no run without communication, or one that nothing can be learnt from.
    """
    alone = [run for run in known if run.run == NO_COMMUNICATION]
    if not alone:
        raise UserError("forecast.timings: none of them has steps without communication")
    cores = float(known[0].host["cores"])
    computes: dict[int, list[Compute]] = {}
    for run in alone:
        computes.setdefault(_busy(run, cores), []).append(learnt_compute(run, cores))
    error = float(np.mean([_standard_error(run.step_ms) for run in alone]))
    means = {busy: _mean(each) for busy, each in computes.items()}
    teachers = [run for run in known if run.run != NO_COMMUNICATION]
    for run in teachers:
        if why := cannot_learn(strategy_of(run), machine):
            raise UserError(f"forecast.runs: {run.run}: {why}: name another run")
    names = dict.fromkeys(strategy_of(run).engine for run in teachers)
    model = Model(machine, cores, means, error, Engines(dict.fromkeys(names, 0.0), 0.0))
    return model._replace(engines=_engines(model, teachers)) if teachers else model


def _busy(run: TimedRun, cores: float) -> int:
    return round(min(run.world_size * run.threads, cores))


def _mean(computes: Sequence[Compute]) -> Compute:
    return Compute(*(sum(each) / len(computes) for each in zip(*computes, strict=True)))


def learnt_compute(run: TimedRun, cores: float) -> Compute:
    """Of one rank that has its cores for itself, from ranks that share them.

    Traced steps say how a step is divided, the others how long it is.
    """
    traced = run.breakdown
    parts = Compute(traced.forward_ms, traced.backward_ms, traced.update_ms)
    share = min(1.0, cores / (run.world_size * run.threads))
    return parts.scaled(share * step_s(run) / sum(parts))


def _standard_error(values: Sequence[float]) -> float:
    """Of the median, relative to it: for normal values 1.25 of that of the mean."""
    if len(values) < 2:
        return 0.0
    return float(1.25 * np.std(values, ddof=1) / len(values) ** 0.5 / np.median(values))


def _engines(model: Model, runs: Sequence[TimedRun]) -> Engines:
    """Seconds per collective that explain the runs best, by least squares.

    Not of relative errors: a wait of some milliseconds comes or does not come in a short step as in
    a long one.
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
    # as few runs as unknowns explain themselves, but are no surer than their rounds
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
