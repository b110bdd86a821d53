"""Performance model of training steps: fitted on some timed runs, then predicting others.

Three things are fitted on timings: computation, from steps without communication; the CPU work of
each engine per collective; and one wait per collective, until the threads of all ranks have a core.
Operations come from the calibration and are never fitted.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit

from shardlab.core.errors import UserError
from shardlab.predict.coding import codings, outer_coding
from shardlab.predict.costs import Costs, MeasuredCosts
from shardlab.predict.machine import Line, Machine
from shardlab.predict.step import OUTER_COPIES, Compute, StepWork, step_seconds, unsupported
from shardlab.results.calibration_record import UPDATE_BYTES, memory_operations
from shardlab.results.result import LinkEmulation, UnitSize
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import CanonicalStrategy, parse_strategy

_LONGEST_S = 0.1
"""upper bound of work and wait of one collective, seconds"""
_UNVALIDATED = 0.2
"""half of the interval that is assumed where a single run was fitted: nothing tells it"""
_LEAST = 0.09
"""least half of an interval: 95 % of 182 held-out runs of the default experiment, measured on seven
days, were predicted with smaller errors"""
_CONFIDENCE = 0.95
_FLOAT = 4


class Workload(NamedTuple):
    """Facts of a step that are the same for every strategy: ranks, model, link."""

    world_size: int
    parameters: int
    """of the model"""
    accumulation: int = 1
    """micro-batches, where the strategy does not say how many"""
    threads: int = 1
    """of each rank"""
    bits_per_second: int | None = None
    """rate of the link; None: loopback"""
    delay_s: float = 0.0
    """latency of each operation on the link"""
    link_emulation: LinkEmulation = "none"
    """as in records; with `namespaces` there are nodes"""
    ranks_per_node: int = 1
    """ranks that share an emulated link"""


class Case(NamedTuple):
    """One prediction to make: the arguments of `PerformanceModel.predict`."""

    strategy: CanonicalStrategy
    units: Sequence[UnitSize]
    """of the strategy, in the order of `shardlab.models.units.unit_sizes`"""
    workload: Workload


def case_of(run: TimingResult) -> Case:
    """Return what a timed run was a measurement of; reads its configuration only."""
    return Case(strategy_of(run), run.units, workload_of(run))


def workload_of(run: TimingResult) -> Workload:
    """Return the workload of a timed run."""
    return Workload(
        run.world_size,
        run.parameters,
        run.accumulation,
        run.threads,
        run.bits_per_second,
        run.delay_ms / 1e3,
        run.link_emulation,
        run.ranks_per_node,
    )


def strategy_of(run: TimingResult) -> CanonicalStrategy:
    """Return the canonical form of a run's strategy."""
    return parse_strategy(run.strategy, f"strategy of {run.run}").canonical()


class Estimate(NamedTuple):
    """A value with its 95 % prediction interval."""

    value: float
    low: float
    high: float


class PerformanceModel(NamedTuple):
    """All fitted parameters of the performance model."""

    machine: Machine
    cores: float
    compute: Mapping[int, Compute]
    """of one rank that has its cores to itself, by the number of busy cores"""
    launch_s: Mapping[str, float]
    """CPU seconds per collective, by engine"""
    wait_s: float
    """per collective, until the threads of all ranks have a core; a property of the machine"""
    half_width: float = 0.0
    """of the 95 % prediction interval, relative to the prediction"""

    def obstacle(self, strategy: CanonicalStrategy) -> str | None:
        """Return why the model cannot predict a canonical strategy, or None if it can."""
        return unpredictable(strategy, self.machine)

    def predict(
        self, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
    ) -> float:
        """Predict the seconds of a step of a strategy that has no obstacle."""
        work = self.work(strategy, units, workload)
        return step_seconds(work, self.costs(workload))

    def estimate(
        self, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
    ) -> Estimate:
        """Predict a step with its 95 % prediction interval."""
        return self.interval(self.predict(strategy, units, workload))

    def interval(self, seconds: float) -> Estimate:
        """Return a prediction with its interval."""
        half = self.half_width * seconds
        return Estimate(seconds, max(seconds - half, 0.0), seconds + half)

    def work(
        self, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
    ) -> StepWork:
        """Return the work of one step of a strategy that has no obstacle."""
        gradients, weights = codings(strategy, self.machine)
        update_s = 0.0
        if strategy.traits.residency == "streamed":
            update_s = self.machine.memory["update"].at(UPDATE_BYTES * workload.parameters)
        return StepWork(
            strategy,
            tuple(unit.elements for unit in units),
            strategy.accumulation or workload.accumulation,
            self.computing(workload),
            # an engine that was never timed gets the mean of the others
            self.launch_s.get(strategy.engine, fmean(self.launch_s.values())),
            self.wait_s,
            gradients,
            weights,
            update_s,
            outer_coding(strategy, self.machine),
            self._outer_update() if strategy.sync else Line(0.0, 0.0),
        )

    def _outer_update(self) -> Line:
        """Return the seconds of an exchange's memory traffic over the elements of a unit."""
        copied = self.machine.memory["copy"]
        return Line(OUTER_COPIES * copied.alpha, OUTER_COPIES * _FLOAT * copied.beta)

    def computing(self, workload: Workload) -> Compute:
        """Return the compute times fitted at the nearest number of busy cores."""
        busy = _busy_cores(workload.world_size * workload.threads, self.cores)
        return self.compute[min(self.compute, key=lambda known: abs(known - busy))]

    def costs(self, workload: Workload) -> Costs:
        """Return the communication and memory costs for the ranks and the link of a workload."""
        return MeasuredCosts(
            self.machine,
            workload.world_size,
            self.cores / workload.threads,
            workload.bits_per_second,
            workload.delay_s,
            workload.ranks_per_node if workload.link_emulation == "namespaces" else None,
        )


def unpredictable(strategy: CanonicalStrategy, machine: Machine) -> str | None:
    """Return why a canonical strategy cannot be predicted, or None if it can."""
    if setting := unsupported(strategy):
        return f"the model does not support {setting}"
    if strategy.param_dtype not in ("auto", "fp32"):  # others than steps without communication
        return f"computation in {strategy.param_dtype} was not timed"
    try:
        codings(strategy, machine)
        outer_coding(strategy, machine)
    except KeyError:
        return "its codec was not calibrated"
    if set(memory_operations(strategy)).difference(machine.memory):
        return "the memory that it moves was not calibrated"
    return None


def fit_model(machine: Machine, known: Sequence[TimingResult]) -> PerformanceModel:
    """Fit the model on known runs, among them runs without communication.

    By least squares of absolute errors, not of relative ones: waits of some milliseconds are as
    likely in a short step as in a long one.

    Raises:
        UserError: there is no run without communication, or no other one of its timing, or one that
            cannot be predicted.
    """
    bounds = [run for run in known if run.run == NO_COMMUNICATION]
    runs = [run for run in known if run.run != NO_COMMUNICATION]
    if not bounds:
        raise UserError("forecast.timings: none of them has steps without communication")
    if not runs:
        raise UserError("forecast.runs: none of them is in forecast.timings: name one that is")
    for run in runs:
        if why := unpredictable(strategy_of(run), machine):
            raise UserError(f"forecast.runs: {run.run}: {why}: name another run")
    cores = float(bounds[0].host["cores"])
    own = {bound.timing: _compute_of(bound, cores) for bound in bounds}
    by_cores: dict[int, list[Compute]] = {}
    for bound in bounds:
        if bound.timing in {run.timing for run in runs}:
            busy = _busy_cores(bound.world_size * bound.threads, cores)
            by_cores.setdefault(busy, []).append(own[bound.timing])
    if not by_cores:
        raise UserError("forecast.timings: those of the runs have no steps without communication")
    compute = {busy: Compute(*map(fmean, zip(*c, strict=True))) for busy, c in by_cores.items()}
    engines = [*dict.fromkeys(strategy_of(run).engine for run in runs)]
    model = PerformanceModel(machine, cores, compute, dict.fromkeys(engines, 0.0), 0.0)

    def with_overheads(values: Sequence[float]) -> PerformanceModel:
        *launches, wait = map(float, values)
        return model._replace(launch_s=dict(zip(engines, launches, strict=True)), wait_s=wait)

    def misses(values: Sequence[float]) -> list[float]:
        of, missed = with_overheads(values), []
        for run in runs:
            case = case_of(run)
            # with the computation of its own timing: what drifts between them is no overhead
            work = of.work(*case)._replace(compute=own.get(run.timing, of.computing(case.workload)))
            missed.append(step_seconds(work, of.costs(case.workload)) - _step_s(run))
        return missed

    start = [1e-4] * (len(engines) + 1)
    fit = least_squares(misses, start, bounds=(0.0, _LONGEST_S), x_scale=1e-3)
    model = with_overheads(fit.x)
    return model._replace(half_width=_half_width(model, runs))


def _half_width(model: PerformanceModel, runs: Sequence[TimingResult]) -> float:
    """Return half the 95 % interval of relative errors.

    From what the model misses of the runs that it was fitted on, by Student's t with as many
    degrees of freedom as these are more than the fitted parameters; but a few runs that are fitted
    well do not make other links and codecs certain.
    """
    freedom = len(runs) - len(model.launch_s) - 1
    if freedom < 1:
        return _UNVALIDATED
    errors = [model.predict(*case_of(run)) / _step_s(run) - 1 for run in runs]
    spread = np.sqrt(np.square(errors).sum() / freedom)
    return max(float(stdtrit(freedom, (1 + _CONFIDENCE) / 2) * spread), _LEAST)


def _busy_cores(threads: int, cores: float) -> int:
    return round(min(threads, cores))


def _compute_of(bound: TimingResult, cores: float) -> Compute:
    """Return the compute times of one rank that has its cores to itself, from ranks that share
    them.

    Traced steps say how a step is divided, the others how long it is.
    """
    traced = bound.breakdown
    parts = Compute(traced.forward_ms, traced.backward_ms, traced.update_ms)
    share = min(1.0, cores / (bound.world_size * bound.threads))
    return parts.scaled(share * _step_s(bound) / sum(parts))


def _step_s(run: TimingResult) -> float:
    """Return the measured step time in seconds: the median of the repetitions."""
    return median(run.step_ms) / 1e3
