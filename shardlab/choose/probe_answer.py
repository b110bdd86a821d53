"""Advice of a probe: ways to synchronise replicas, ranked by the rule that chooses.

Plain arithmetic of speed, from measured times. Nothing overlaps in it, and it judges no quality.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.choose.rank import Option, Ranking, rank
from shardlab.predict.asked import changes_training
from shardlab.predict.offers import replica_candidates
from shardlab.results.interval import Ratio
from shardlab.strategy.document import CanonicalStrategy, parse_strategy

STOCK = "all-reduce"
"""torch's own, uncompressed; no codec has that name"""


class Times(NamedTuple):
    """Median of the times of the slowest rank, with its 96 % interval; in seconds."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Times":
        """Return the times of `factor` times as much."""
        return Times(*(factor * seconds for seconds in self))

    def __str__(self) -> str:
        median, low, high = (f"{seconds * 1e3:.4g}" for seconds in self)
        return f"{median} ms ({low} to {high})"


class Replicas(NamedTuple):
    """A way to synchronise replicas, and what it takes."""

    name: str
    strategy: CanonicalStrategy
    lossy: bool
    ratio: float
    """seconds of synchronisation for each of a step's computation"""


def replicas_of(ratios: Mapping[str, float], nodes: int = 1) -> list[Replicas]:
    """Return the ways to synchronise replicas.

    Args:
        ratios: seconds of an all-reduce over those of a step's computation, by `STOCK` and codec,
            the strongest last.
        nodes: replicas, each of which shards the model inside; 1: each rank is a replica.
    """
    offers = []
    for offer in replica_candidates([*ratios][-1], nodes):
        strategy = parse_strategy(offer.document, offer.name).canonical()
        ratio = ratios[offer.codec or STOCK] / _every(strategy)
        offers.append(Replicas(offer.name, strategy, offer.lossy, ratio))
    return offers


def _every(strategy: CanonicalStrategy) -> int:
    """Return the steps from one synchronisation to the next."""
    return strategy.sync.every if strategy.sync else 1


ALONE = "one replica alone"


def rank_replicas(offers: Sequence[Replicas], count: int) -> Ranking:
    """Rank ways to synchronise so many replicas, and one alone, by the time of a sample; nothing
    overlaps, so a ratio is no measurement of a step."""

    def option(place: int, offer: Replicas) -> Option:
        step = Ratio((1 + offer.ratio) / count, math.nan, math.nan)
        return Option(
            offer.name,
            step,
            devices=count,
            measured=False,
            lossless=not offer.lossy,
            simplicity=place,
        )

    alone = Option(ALONE, Ratio(1.0, math.nan, math.nan), measured=False)
    options = [option(place, offer) for place, offer in enumerate(offers)]
    return rank(options, [alone], tolerance=0.0)


def advice(
    link: str,
    count: int,
    times: Mapping[str, Times],
    gradient_bytes: int,
    what: str,
    computation: Times,
    sharded: bool = False,
    asked: Mapping[str, tuple[CanonicalStrategy, Times]] | None = None,
) -> str:
    """Return what the ways to synchronise replicas cost, and which to use.

    Args:
        link: its name.
        count: replicas.
        times: of an all-reduce of the gradient, by `STOCK` and codec, the strongest last.
        gradient_bytes: that each rank reduces over the link.
        what: is called computation, in words.
        sharded: whether each replica shards the model inside; otherwise each rank is a replica.
        asked: strategies of the user, with the times of what their replicas send at once.
    """
    ratios = {name: time.median / computation.median for name, time in times.items()}
    offers, stock = replicas_of(ratios, count if sharded else 1), times[STOCK]
    for name, (strategy, time) in (asked or {}).items():
        ratio = time.median / computation.median / _every(strategy)
        offers.append(Replicas(name, strategy, changes_training(strategy), ratio))
    ranking = rank_replicas(offers, count)
    even = ranking.break_even
    width = max(len(offer.name) for offer in offers)
    lines = [
        f"\n{link}: synchronisation / computation {ratios[STOCK]:.3g} "
        f"({stock.low / computation.high:.3g} to {stock.high / computation.low:.3g})",
        f"  all-reduce of {gradient_bytes:,} bytes at the rate above {stock}",
        f"  {what} {computation}",
        f"  {'':{width}}    ratio  of step     gain     even",
    ]
    for offer in offers:
        part = f"{100 * offer.ratio / (1 + offer.ratio):.1f} %"
        gain = count / (1 + offer.ratio)
        pays = f" {even[offer.name]:8.2f}" if offer.name in even else ""
        lines.append(f"  {offer.name:{width}} {offer.ratio:8.3g} {part:>8} {gain:8.2f}{pays}")
    return "\n".join([*lines, *_uses({offer.name: offer for offer in offers}, ranking)])


def _uses(offers: Mapping[str, Replicas], ranking: Ranking) -> list[str]:
    """Return what to use without loss, and what else may be sooner at a loss, with the lines of a
    script."""
    first = ranking.order[0]
    lines = [f"  without loss use {first.option.name}: {first.reason}"]
    if not ranking.gaining:
        return [*lines, "  nothing that changes training is faster"]
    name = ranking.gaining[0]
    even, script = ranking.break_even[name], offers[name].strategy.attach_call() or ""
    lines.append(f"  {name} is sooner at a loss if it needs fewer than {even:.2f} x the samples")
    return [*lines, *(f"  {line}" for line in script.splitlines())]


LEGEND = """
of step: share of synchronisation without overlap; backward may hide some of it
gain: samples per second over those of one replica, as fast as while all compute
even: it changes training, and pays where it needs fewer than so many times the samples to a loss
Quality is not judged here: experiments/islands/README.md has times to one loss of two replicas."""
