"""Performance model of training steps: fitted on some timed runs, then predicting others."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from shardlab.config.calibration_record import UPDATE_BYTES, memory_operations
from shardlab.config.link import bucket_bytes
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun, UnitSize
from shardlab.core.errors import UserError
from shardlab.forecast.bounds import (
    Bound,
    Speed,
    bounds_of,
    busy_cores,
    mean_compute,
    speed_of,
    step_s,
)
from shardlab.forecast.coding import codings
from shardlab.forecast.costs import Costs, Measured
from shardlab.forecast.machine import Machine
from shardlab.forecast.matrices import levels_of_units
from shardlab.forecast.overheads import Engines, Measurement, fit_engines
from shardlab.forecast.recomputation import (
    Recomputation,
    fit_recomputation,
    is_selective,
)
from shardlab.forecast.step import obstacle, step_seconds
from shardlab.forecast.work import Compute, Work
from shardlab.forecast.workload import Workload, case_of, strategy_of


class Model(NamedTuple):
    """All fitted parameters of the performance model."""

    machine: Machine
    cores: float
    compute: dict[int, Compute]
    """of one rank that has its cores to itself, by the number of busy cores"""
    engines: Engines
    recomputation: Recomputation = Recomputation()
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
        if is_selective(strategy) and self.recomputation.selective is None:
            return "selective activation checkpointing was in no run that the model was fitted on"
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
        gradients, weights = codings(strategy, self.machine)
        return Work(
            strategy,
            tuple(unit.elements for unit in units),
            strategy.accumulation or workload.accumulation,
            self.computing(workload),
            self.engines.of(strategy.engine),
            gradients,
            weights,
            self._update_s(workload) if strategy.traits.residency == "streamed" else 0.0,
            self.recomputation.selective or 0.0,
            of_units=levels_of_units(strategy, gradients, units, workload.world_size),
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
    if strategy.param_dtype not in ("auto", "fp32"):  # others than steps without communication
        return f"computation in {strategy.param_dtype} was not timed"
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
    selective = [run for run in fitted if is_selective(strategy_of(run))]
    plain = [run for run in fitted if not is_selective(strategy_of(run))]
    names = dict.fromkeys(strategy_of(run).engine for run in plain)
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
    computes = {bound.timing: bound.compute for bound in own}
    if plain:
        model = model._replace(
            engines=fit_engines([*names], _measured(model, plain, computes), plain)
        )
    if plain and selective:
        steps = _measured(model, selective, computes)
        recomputation = fit_recomputation(steps, model.engines.noise)
        model = model._replace(recomputation=recomputation)
    return model.at(speed_of(bounds, compute))


def _measured(
    model: Model, runs: Sequence[TimedRun], own: Mapping[str, Compute]
) -> list[Measurement]:
    """Return timed steps with the work that the model says they have.

    Args:
        own: compute times of each timing, so that what drifts between timings is no overhead.
    """
    steps = []
    for run in runs:
        case = case_of(run)
        work = model.work(*case)
        work = work._replace(compute=own.get(run.timing, work.compute))
        steps.append(Measurement(work, model.costs(case.workload), step_s(run)))
    return steps
