"""What a search holds before its first race, by the rule that chooses among all measurements."""

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
    """Return a strategy that was measured as an option under its hash.

    A search holds by the mean perplexity over seeds, of which it trains few; a verdict asks for its
    interval.

    Args:
        step: over that of a common reference.
        quality: counts where it is sure.
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
    """Return what the rule puts first of all that was measured on the link and the ranks of the
    search, and did not fail; the start, where nothing may be used.

    Args:
        tolerance: largest relative rise of perplexity.
        limit_bytes: of the peak of a rank.
        peaks: of ranks, by hash; what is not there fits.
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
    # races do not time one device
    first = rank(options, [], tolerance, limit_bytes).first
    return history.start_results if first is None else history.measured[str(first.name)]


def hold_best(
    history: History, tolerance: float, limit_bytes: int, peaks: Mapping[str, int]
) -> History:
    """Return the history with `best_measured` held, if its search has no round.

    The first race has to confirm it.

    Args:
        tolerance, limit_bytes, peaks: of `best_measured`.
    """
    if history.own_rounds:
        return history
    best = best_measured(history, tolerance, limit_bytes, peaks)
    return history.model_copy(update={"incumbent": best.hash})
