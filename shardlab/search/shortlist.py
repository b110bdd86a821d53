"""Shortlist: the best of each class of feasible strategies, and one that is worth a look.

Many strategies lie within the error of a prediction, so a list of the shortest steps would hold
one idea many times. A class is an engine with a kind of codec; classes that differ in the codec of
the weights are one where their predictions tie.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.config.strategy import CanonicalStrategy
from shardlab.search.history import History
from shardlab.search.surrogate import Ranked

_TIE = 0.05
"""relative difference of steps that predictions cannot tell apart"""


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
    known = 0
    for each in ranked:
        strategy = each.feasible.strategy
        quality = history.quality(strategy)
        if _was_tried(each, history) or (quality and not quality.ratio <= 1 + tolerance):
            known += 1
        elif quality is None or each.seconds is None:
            exploratory = exploratory or each
        else:
            tolerated.append(each)
            if not any(_is_alike(each, other) for other in best):
                best.append(each)
    places = at_most - (exploratory is not None)
    return Shortlist(best[:places], exploratory, tolerated, known)


def class_of(strategy: CanonicalStrategy) -> tuple[str, ...]:
    """Return engine and names of the codecs."""
    weights = strategy.weights.codec.name if strategy.weights else "none"
    return strategy.engine, strategy.gradients.codec.name, weights


def _is_alike(each: Ranked, best: Ranked) -> bool:
    """Return whether the shorter of two predictions stands for the other, too."""
    assert each.seconds is not None and best.seconds is not None, "it was predicted"
    *kind, weights = class_of(each.feasible.strategy)
    *other, others = class_of(best.feasible.strategy)
    return kind == other and (weights == others or each.seconds <= (1 + _TIE) * best.seconds)


def _was_tried(each: Ranked, history: History) -> bool:
    """Return whether it failed, or its steps were compared with the start's: that says enough."""
    entry = history.measured.get(each.feasible.hash)
    return entry is not None and (bool(entry.steps) or entry.outcome != "ok")
