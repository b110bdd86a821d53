"""Incumbent of a search before its first race, by the rule that chooses among all measurements."""

from collections.abc import Mapping

from shardlab.choose.history import History, PerplexityRatio
from shardlab.choose.rank import Option, rank, simplicity_of
from shardlab.results.interval import Ratio
from shardlab.results.table import StrategyResults
from shardlab.strategy.document import CanonicalStrategy


def option_of(
    strategy: CanonicalStrategy,
    step: Ratio | None,
    quality: PerplexityRatio | None,
    memory: int = 0,
) -> Option:
    """Return a measured strategy as an option, named by its hash.

    A search decides by the mean perplexity over seeds, since it trains few. A verdict of the report
    decides by the interval.

    Args:
        step: step over the step of a common baseline.
        quality: perplexity over the start's; unknown for the rule unless it is sure.
        memory: peak of a rank, bytes.
    """
    return Option(
        strategy.hash(),
        step,
        lossless=quality is not None and quality.lossless,
        perplexity=quality.perplexity if quality is not None and quality.sure else None,
        memory=memory,
        simplicity=simplicity_of(strategy),
        label=strategy.label(),
    )


def best_measured(
    history: History, tolerance: float, limit_bytes: int, peaks: Mapping[str, int]
) -> StrategyResults:
    """Return the strategy that the rule ranks first, among all that were measured on the link and
    the ranks of the search without a failure; the start, where none may be used.

    Args:
        tolerance: largest relative rise of perplexity.
        limit_bytes: limit of the peak of a rank.
        peaks: peaks of a rank in bytes, by hash; a strategy without a peak fits.
    """
    quality = history.quality
    options = [
        option_of(
            row.strategy,
            Ratio(step.ratio, step.low, step.high),
            quality(row.strategy),
            memory=peaks.get(row.hash, 0),
        )
        for row in history.measured.values()
        if (step := row.step(history.workload)) and not row.failure(history.workload)
    ]
    # no option is a single device, since races do not time one
    first = rank(options, [], tolerance, limit_bytes).first
    return history.start_results if first is None else history.measured[str(first.name)]


def with_best_incumbent(
    history: History, tolerance: float, limit_bytes: int, peaks: Mapping[str, int]
) -> History:
    """Return the history with `best_measured` as incumbent, if its search has no round yet.

    The first race has to confirm it.

    Args:
        tolerance, limit_bytes, peaks: as in `best_measured`.
    """
    if history.search_rounds:
        return history
    best = best_measured(history, tolerance, limit_bytes, peaks)
    return history.model_copy(update={"incumbent": best.hash})
