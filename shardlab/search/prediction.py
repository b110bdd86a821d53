"""Predictions in place of measurements, and the shortlist of what they say is fast.

Steps are predicted by the forecast, memory by formula, quality by earlier runs. Many strategies lie
within the error of a prediction, so a list of the shortest steps would hold one idea many times:
the shortlist has the best of each class, an engine with a kind of codec, and one strategy of
unknown quality. Classes that differ in the codec of the weights are one where predictions tie.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardlab.config.calibration_record import Calibration
from shardlab.config.schema import Agent, Train
from shardlab.config.timing_record import TimedRun
from shardlab.forecast.machine import fit_machine
from shardlab.forecast.model import Model, Workload, fit_model, strategy_of, unpredictable
from shardlab.search.history import History
from shardlab.search.records import Prediction
from shardlab.search.space import Feasible, Shapes

_TIE = 0.05
"""relative difference of steps that predictions cannot tell apart"""


class Ranked(NamedTuple):
    """A feasible strategy with its predicted step; None where the model cannot predict it."""

    feasible: Feasible
    seconds: float | None


def fit(calibration: Calibration, timed: Sequence[TimedRun], raced: Iterable[TimedRun]) -> Model:
    """Return the model fitted on timings and on what earlier races timed, as far as it covers
    these.

    Raises:
        UserError: the calibration or the timings lack something.
    """
    machine = fit_machine(calibration)
    covered = [
        run for run in raced if run.strategy is None or not unpredictable(strategy_of(run), machine)
    ]
    return fit_model(machine, [*timed, *covered])


def workload_of(
    history: History, agent: Agent, train: Train, timed: Iterable[TimedRun]
) -> Workload:
    """Return ranks and link of the search.

    Args:
        timed: any timings; those with a link say how it is emulated here.
    """
    link, load = agent.link or train.link, history.workload
    emulations = (run.link_emulation for run in timed if run.bits_per_second is not None)
    return Workload(
        world_size=load.world_size,
        parameters=load.parameters,
        accumulation=load.accumulation,
        threads=train.threads,
        bits_per_second=link.bits_per_second if link else None,
        delay_s=link.delay_ms / 1e3 if link else 0.0,
        link_emulation=next(emulations, "namespaces") if link else "none",
    )


class Predictor:
    """Predicts strategies in place of measuring them.

    Args:
        model: fitted on timings, those of earlier races included.
        workload: ranks and link of the search.
    """

    def __init__(self, model: Model, workload: Workload, shapes: Shapes, history: History) -> None:
        self._model, self._workload, self._shapes = model, workload, shapes
        self._quality = history.qualities()

    def rank(self, strategies: Iterable[Feasible], unpredicted: Counter[str]) -> list[Ranked]:
        """Predict steps without intervals, the shortest first; those without prediction last.

        Args:
            unpredicted: how many could not be predicted, by reason.
        """
        ranked = []
        for feasible in strategies:
            strategy = feasible.strategy
            if obstacle := self._model.obstacle(strategy):
                unpredicted[obstacle] += 1
                ranked.append(Ranked(feasible, None))
                continue
            units = self._shapes.units(strategy)
            seconds = self._model.predict(strategy, units, self._workload)
            ranked.append(Ranked(feasible, seconds))
        return sorted(ranked, key=_order)

    def predict(self, feasible: Feasible) -> Prediction:
        """Predict everything of a strategy, with the interval of its step."""
        strategy = feasible.strategy
        quality, obstacle = self._quality(strategy), self._model.obstacle(strategy)
        step = None
        if obstacle is None:
            units = self._shapes.units(strategy)
            step = self._model.estimate(strategy, units, self._workload)
        known = quality is not None and quality.ratio < float("inf")
        return Prediction(
            step_ms=step and 1e3 * step.value,
            low_ms=step and 1e3 * step.low,
            high_ms=step and 1e3 * step.high,
            memory_bytes=feasible.memory_bytes,
            perplexity_ratio=quality.ratio if quality and known else None,
            note=obstacle or (quality.source if quality else "its codecs were never trained with"),
        )


def _order(ranked: Ranked) -> tuple[Any, ...]:
    # of ties first what compresses less, then by hash: the same list in every run
    weights = ranked.feasible.strategy.weights is not None
    return ranked.seconds is None, ranked.seconds, weights, ranked.feasible.hash


class Shortlist(NamedTuple):
    """Strategies that a judge may choose from, and those among which the controls are."""

    best: list[Ranked]
    """the shortest predicted steps of each class whose quality is known and tolerated"""
    exploratory: Ranked | None
    """the shortest of unknown quality, or one whose step cannot be predicted"""
    tolerated: list[Ranked]
    """all new strategies of known, tolerated quality, the shortest predicted step first"""
    known: int
    """number that were left out: timed before, failed, or worse than is tolerated"""


def shorten(
    ranked: Sequence[Ranked], history: History, tolerance: float, at_most: int
) -> Shortlist:
    """Shorten the predictions to at most so many strategies.

    Args:
        ranked: the shortest step first, those without prediction last.
        tolerance: largest relative rise of perplexity.
        at_most: strategies that a judge may choose from, the exploratory one included.
    """
    best: list[Ranked] = []
    tolerated: list[Ranked] = []
    exploratory: Ranked | None = None
    known, tried, quality_of = 0, history.tried, history.qualities()
    for candidate in ranked:
        quality = quality_of(candidate.feasible.strategy)
        if candidate.feasible.hash in tried or (quality and not quality.ratio <= 1 + tolerance):
            known += 1
        elif quality is None or candidate.seconds is None:
            exploratory = exploratory or candidate
        else:
            tolerated.append(candidate)
            if not any(_is_alike(candidate, other) for other in best):
                best.append(candidate)
    return Shortlist(best[: at_most - (exploratory is not None)], exploratory, tolerated, known)


def _is_alike(candidate: Ranked, best: Ranked) -> bool:
    """Return whether the shorter of two predictions stands for the other, too: it has the same
    engine and codecs, or only the codec of the weights differs and the predictions tie."""
    assert candidate.seconds is not None and best.seconds is not None, "it was predicted"
    one, other = candidate.feasible.strategy, best.feasible.strategy
    weights, others = (s.weights.codec.name if s.weights else "none" for s in (one, other))
    return (
        one.engine == other.engine
        and one.gradients.codec.name == other.gradients.codec.name
        and (weights == others or candidate.seconds <= (1 + _TIE) * best.seconds)
    )
