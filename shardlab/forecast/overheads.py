"""Overheads of engines per collective, fitted on timed steps."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import ndtri, stdtrit

from shardlab.config.timing_record import TimedRun
from shardlab.forecast.bounds import standard_error, step_s
from shardlab.forecast.costs import Costs
from shardlab.forecast.step import step_seconds
from shardlab.forecast.work import Overhead, Work

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
    relative: float = 0.0
    """the same of relative differences, since errors of rates grow with the step and those of waits
    do not; widened as much as Student's t is by the few steps that it is known from"""
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


class Measurement(NamedTuple):
    """A timed step."""

    work: Work
    """with the computation of its timing"""
    costs: Costs
    seconds: float


def fit_engines(
    names: Sequence[str], steps: Sequence[Measurement], runs: Sequence[TimedRun]
) -> Engines:
    """Fit the overhead per collective by least squares of absolute errors.

    Not of relative errors: waits of some milliseconds are as likely in a short step as in a long
    one.

    Args:
        names: of the engines.
        runs: of which the steps are.
    """

    def misfit(given: Sequence[float]) -> list[float]:
        *each, wait = given
        overhead = {name: Overhead(s, wait) for name, s in zip(names, each, strict=True)}
        return [
            step_seconds(work._replace(overhead=overhead[work.strategy.engine]), costs) - measured
            for work, costs, measured in steps
        ]

    start = [1e-4] * (len(names) + 1)
    found = least_squares(misfit, start, bounds=(0.0, _LONGEST_S), x_scale=1e-3)
    freedom = max(len(steps) - len(start), 1)
    unexplained = 2 * found.cost / freedom
    differences = np.array(misfit(found.x)) / [step.seconds for step in steps]
    relative = (differences**2).sum() / freedom
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
        float(relative**0.5 * stdtrit(freedom, 0.975) / ndtri(0.975)),
    )
