"""Alpha-beta models: straight lines of seconds over sizes, fitted to measured operations.

Hockney 1994, The communication challenge for MPP: t = alpha + beta x. Points are weighted by
1/t^2: small and large operations count alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from shardlab.core.interval import interval_factor


class Line(NamedTuple):
    """Line alpha + beta x with the covariance of both parameters."""

    alpha: float
    beta: float
    covariance: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    points: int = 0

    def at(self, x: float) -> float:
        """Return the seconds for size x."""
        return self.alpha + self.beta * x

    def intervals(self) -> tuple[float, float]:
        """Return half the width of the 95 % intervals of alpha and beta, by Student's t."""
        freedom = self.points - 2
        # the factor is of a mean: without its root it is the quantile
        quantile = interval_factor(freedom + 1) * (freedom + 1) ** 0.5
        alpha, beta = (max(self.covariance[i][i], 0.0) ** 0.5 for i in (0, 1))
        return quantile * alpha, quantile * beta


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line by least squares of relative errors; alpha and beta are not negative.

    Args:
        sizes, seconds: three points or more, of two sizes or more.
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    # sizes are scaled to the order of 1, which the solver needs
    scale = x.max()
    weighted = np.column_stack([1 / t, x / scale / t])
    found = lsq_linear(weighted, np.ones_like(t), bounds=(0, np.inf))
    residuals: NDArray[np.float64] = weighted @ found.x - 1
    variance = float(residuals @ residuals) / max(len(t) - 2, 1)
    covariance = variance * np.linalg.inv(weighted.T @ weighted)
    covariance /= np.outer([1, scale], [1, scale])
    alpha, beta = found.x / [1, scale]
    (a, b), (_, c) = covariance.tolist()
    return Line(float(alpha), float(beta), ((a, b), (b, c)), len(t))
