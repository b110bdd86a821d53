"""Errors and power of races, by simulation.

    python -m benchmarks.race_errors [--searches N]

A search is 8 races of 3 challengers each that share the steps of an incumbent; its error is divided
among all 24. `false` is the share of searches of challengers without a gain that accept any. The
second table compares the rule with other boundaries at the same centre and standard error.

Noise, of which the log ratio of two steps has the standard deviation `sd`: normal; heavy: Student's
t with 3 degrees of freedom; disturbed: normal, and a tenth of all steps takes 1 + Exp(1) times as
long; correlated: AR(1) with coefficient 0.1 or 0.2.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from benchmarks.common import WORK, arguments, print_table, write_results
from shardlab.search.sequential import SEARCH_ERROR, RaceRule, centre, standings_of

Array = NDArray[np.float64]
RACES, CHALLENGERS = 8, 3
RULE = RaceRule.of_search(RACES * CHALLENGERS)
NOISES = ("normal", "heavy", "disturbed", "correlated 0.1", "correlated 0.2")
_GAINS = (-0.1, 0.0, 0.03, 0.05, 0.1, 0.2)
_SDS = (0.1, 0.2, 0.25)


def log_ratios(
    rng: np.random.Generator, noise: str, sd: float, gain: float, races: int, challengers: int
) -> Array:
    """Return log step times of challengers over those of their incumbent.

    Returns:
        [races, challengers, repetitions]
    """
    steps = _log_steps(rng, noise, sd / math.sqrt(2), (races, 1 + challengers, RULE.most))
    return steps[:, 1:] - steps[:, :1] + math.log1p(-gain)


def _log_steps(rng: np.random.Generator, noise: str, sd: float, shape: tuple[int, ...]) -> Array:
    if noise == "heavy":
        return sd * rng.standard_t(3, shape) / math.sqrt(3)
    steps = rng.normal(0, sd, shape)
    if noise == "disturbed":
        steps += np.log1p((rng.random(shape) < 0.1) * rng.exponential(1, shape))
    if noise.startswith("correlated"):
        coefficient = float(noise.split()[1])
        steps[..., 1:] *= math.sqrt(1 - coefficient**2)
        for number in range(1, shape[-1]):
            steps[..., number] += coefficient * steps[..., number - 1]
    return steps


def false_accepts(rng: np.random.Generator, noise: str, sd: float, searches: int) -> float:
    """Return the share of searches without any gain that accept a challenger."""
    ratios = log_ratios(rng, noise, sd, 0, searches * RACES, CHALLENGERS)
    faster = standings_of(ratios.reshape(-1, RULE.most), RULE).faster
    return float(faster.reshape(searches, -1).any(axis=1).mean())


def sequence(ratios: Array, student: bool) -> tuple[NDArray[np.bool_], Array]:
    """Return acceptance and repetitions by the asymptotic confidence sequence.

    Waudby-Smith et al. 2024, one-sided, tuned to 60 repetitions.

    Args:
        ratios: [challengers, repetitions].
        student: whether Student's t replaces the normal distribution at the same probability.
    """
    twice = -2 * math.log(2 * RULE.false_accept)
    scale = (twice + math.log(twice) + 1) / 60
    faster, taken = np.zeros(len(ratios), bool), np.full(len(ratios), float(RULE.most))
    for look in RULE.looks:
        mean, error, freedom = centre(ratios[:, :look])
        spread = look * scale + 1
        z = math.sqrt(
            2 * spread / (look * scale) * math.log1p(math.sqrt(spread) / 2 / RULE.false_accept)
        )
        new = ~faster & (mean + (stdtrit(freedom, ndtr(z)) if student else z) * error < 0)
        taken[new] = look
        faster |= new
    return faster, taken


def spending(ratios: Array) -> tuple[NDArray[np.bool_], Array]:
    """Return acceptance and repetitions by the rule, without giving up."""
    found = standings_of(ratios, RaceRule(RULE.false_accept, useful=-math.inf, most=RULE.most))
    return found.faster, found.repetitions.astype(float)


def _rule_row(
    rng: np.random.Generator, noise: str, sd: float, gain: float, searches: int
) -> dict[str, Any]:
    found = standings_of(log_ratios(rng, noise, sd, gain, 2 * searches, 1)[:, 0], RULE)
    return {
        "noise": noise,
        "sd": sd,
        "gain": gain,
        "accepted": float(found.faster.mean()),
        "hopeless": float(found.hopeless.mean()),
        "repetitions": float(found.repetitions.mean()),
        "missed": float((found.low > 1 - gain).mean()),
        "above": float((found.high < 1 - gain).mean()),
    }


def main() -> None:
    args = arguments(__doc__, searches=2000)
    rng = np.random.default_rng(0)
    rows, compared = [], []
    ways: dict[str, Callable[[Array], tuple[NDArray[np.bool_], Array]]] = {
        "rule": spending,
        "confidence sequence": partial(sequence, student=False),
        "confidence sequence, Student": partial(sequence, student=True),
    }
    for noise in NOISES:
        for sd in _SDS:
            false = false_accepts(rng, noise, sd, args.searches)
            for gain in _GAINS:
                row = _rule_row(rng, noise, sd, gain, args.searches)
                rows.append(row | ({"false": false} if gain == 0 else {}))
        same = log_ratios(rng, noise, 0.2, 0, args.searches * RACES, CHALLENGERS)
        better = log_ratios(rng, noise, 0.2, 0.1, args.searches, 1)[:, 0]
        for name, way in ways.items():
            wrong = way(same.reshape(-1, RULE.most))[0].reshape(args.searches, -1).any(axis=1)
            accepted, taken = way(better)
            compared.append(
                {
                    "noise": noise,
                    "boundary": name,
                    "false": float(wrong.mean()),
                    "accepted": float(accepted.mean()),
                    "repetitions": float(taken.mean()),
                }
            )
    write_results(WORK[0] / "race_errors.json", rule=rows, boundaries=compared)
    _print(f"{args.searches} searches; error of a search {SEARCH_ERROR:.0%}", rows)
    _print("A gain of 10 % at sd 0.2, without giving up", compared)


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    headings = list(rows[1] if len(rows[1]) > len(rows[0]) else rows[0])
    table = [[_text(name, row.get(name)) for name in headings] for row in rows]
    print_table(title, headings, table)


def _text(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return (
        f"{value:.0f}"
        if name == "repetitions"
        else f"{value:.2f}"
        if name == "sd"
        else f"{100 * value:.1f} %"
    )


if __name__ == "__main__":
    main()
