"""Prediction intervals: covariances of the fits, propagated through the simulation.

First order: the variance is the sum over the independent directions of the fits of the squared
change of the forecast for one standard deviation (JCGM 100:2008, section 5.1).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import UnitSize
from shardlab.forecast.bounds import Speed
from shardlab.forecast.coding import needed
from shardlab.forecast.machine import Line
from shardlab.forecast.model import Model
from shardlab.forecast.workload import Case, Workload

_NORMAL = 1.959964
"""standard deviations of a normal distribution around 95 %"""


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(
    model: Model, strategy: CanonicalStrategy, units: Sequence[UnitSize], workload: Workload
) -> Estimate:
    """Predict a step of a strategy that has no obstacle, with the interval of a measurement."""
    case = Case(strategy, units, workload)
    # what is not used would only cost simulations
    model = model._replace(machine=needed(model.machine, strategy))
    engines = model.engines
    return propagate(
        lambda other: other.predict(*case), model, engines.noise, engines.relative, whole=True
    )


def propagate(
    forecast: Callable[[Model], float],
    model: Model,
    noise: float = 0.0,
    relative: float = 0.0,
    whole: bool = False,
) -> Estimate:
    """Predict with the interval that follows from the fits; unused parameters cost nothing.

    Args:
        noise, relative: standard deviation of a measurement that the prediction interval must
            cover, absolute and relative to the forecast; the larger counts.
        whole: the drift of the machine slows the whole step: transfers, codecs and waits need its
            cores as computation does, and the calibration may have been at yet another speed. Else,
            as on another machine, computation alone is unsure.
    """
    value = forecast(model)
    variance, fits = max(noise, relative * value) ** 2, model
    if whole:
        speed, fits = model.speed, model._replace(speed=Speed())
        calibrated = 1 + (speed.calibration**2 - speed.drift**2) ** 0.5
        at_another = model._replace(machine=model.machine.scaled(calibrated))
        variance += (speed.drift * value) ** 2 + (forecast(at_another) - value) ** 2
    variance += sum((forecast(other) - value) ** 2 for other in directions(fits))
    half = _NORMAL * variance**0.5
    return Estimate(value, max(value - half, 0.0), value + half)


def directions(model: Model) -> Iterator[Model]:
    """Yield the model shifted by one standard deviation along each independent direction."""
    machine = model.machine
    for operation, line in machine.transport.items():
        for other in _moved(line):
            transport = {**machine.transport, operation: other}
            yield model._replace(machine=machine._replace(transport=transport))
    for kind, lines in machine.codecs.items():
        encoding = [lines._replace(encode=other) for other in _moved(lines.encode)]
        decoding = [lines._replace(decode=other) for other in _moved(lines.decode)]
        for moved in (*encoding, *decoding):
            codecs = {**machine.codecs, kind: moved}
            yield model._replace(machine=machine._replace(codecs=codecs))
    for method, ways in machine.phased.items():
        for way, phases in ways.items():
            for other in _moved(phases.seconds):
                changed = {**ways, way: phases._replace(seconds=other)}
                phased = {**machine.phased, method: changed}
                yield model._replace(machine=machine._replace(phased=phased))
    for name, memory_line in machine.memory.items():
        for other in _moved(memory_line):
            memory = {**machine.memory, name: other}
            yield model._replace(machine=machine._replace(memory=memory))
    engines = model.engines
    for change in _columns(engines.covariance):
        shifted = zip((*engines.work.values(), engines.wait), change, strict=True)
        *works, wait = (max(value + more, 0.0) for value, more in shifted)
        work = dict(zip(engines.work, works, strict=True))
        yield model._replace(engines=engines._replace(work=work, wait=wait))
    if engines.work:  # what an engine that was never timed costs is as unsure as the largest known
        yield model._replace(engines=engines._replace(more=max(engines.work.values())))
    share = model.recomputation
    if share.selective is not None:
        more = share._replace(selective=share.selective + share.error)
        yield model._replace(recomputation=more)
    if model.speed.drift:
        slower = {busy: each.scaled(1 + model.speed.drift) for busy, each in model.compute.items()}
        yield model._replace(compute=slower)


def _moved(line: Line) -> Iterator[Line]:
    for alpha, beta in _columns(line.covariance):
        yield line._replace(alpha=max(line.alpha + alpha, 0.0), beta=max(line.beta + beta, 0.0))


def _columns(covariance: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the eigenvectors of a covariance, scaled to the standard deviation along each."""
    if not covariance:
        return []
    # seconds and seconds per byte differ by ten orders of magnitude
    scale = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    values, vectors = np.linalg.eigh(np.asarray(covariance) / np.outer(scale, scale))
    columns = vectors * np.sqrt(np.maximum(values, 0.0)) * scale[:, None]
    found: list[list[float]] = columns.T.tolist()
    return found
