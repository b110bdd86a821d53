"""Recomputation of blocks in backward under activation checkpointing."""

from collections.abc import Sequence
from typing import NamedTuple

from scipy.optimize import least_squares

from shardlab.config.strategy import CanonicalStrategy
from shardlab.forecast.overheads import Measurement
from shardlab.forecast.step import step_seconds

_MOST = 10.0
"""upper bound of a share of forward"""


class Recomputation(NamedTuple):
    """Share of forward that selective checkpointing adds to backward.

    It is fitted on timed steps, since dispatching operations takes longer than what it saves in
    small blocks: no share of operations tells it.
    """

    selective: float | None = None
    """None: no fitted run has it"""
    error: float = 0.0
    """standard error of it"""


def is_selective(strategy: CanonicalStrategy) -> bool:
    """Return whether any block of a canonical strategy is checkpointed selectively."""
    modes = {each.activation_checkpointing for each in strategy.overrides}
    return "selective" in modes | {strategy.activation_checkpointing}


def fit_recomputation(measured: Sequence[Measurement], noise: float) -> Recomputation:
    """Fit the share by least squares of absolute errors.

    Args:
        measured: one or more steps of strategies that are selective.
        noise: standard deviation of a measured step, at least; seconds.
    """

    def misfit(given: Sequence[float]) -> list[float]:
        return [
            step_seconds(work._replace(selective=float(given[0])), costs) - seconds
            for work, costs, seconds in measured
        ]

    found = least_squares(misfit, [0.5], bounds=(0.0, _MOST))
    variance = max(2 * found.cost / max(len(measured) - 1, 1), noise**2)
    slope = float((found.jac**2).sum())
    return Recomputation(float(found.x[0]), (variance / slope) ** 0.5)
