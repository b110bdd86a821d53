"""Advice of a probe: ways to synchronise replicas, ranked by the rule that chooses.

The ranking is arithmetic with measured times. It assumes no overlap, and it does not judge quality.
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
"""Torch's own uncompressed all-reduce; no codec has this name."""


class Times(NamedTuple):
    """Median of the times of the slowest rank, with its 96 % interval, in seconds."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Times":
        """Return the times of `factor` times the work."""
        return Times(*(factor * seconds for seconds in self))

    def __str__(self) -> str:
        median, low, high = (f"{seconds * 1e3:.4g}" for seconds in self)
        return f"{median} ms ({low} to {high})"


class Replicas(NamedTuple):
    """A way to synchronise replicas, and its cost."""

    name: str
    strategy: CanonicalStrategy
    lossy: bool
    ratio: float
    """Synchronisation over computation of a step, in time."""


def replicas_of(ratios: Mapping[str, float], nodes: int = 1) -> list[Replicas]:
    """Return the ways to synchronise replicas.

    Args:
        ratios: time of an all-reduce over the computation of a step, by `STOCK` and codec, the
            strongest codec last.
        nodes: number of replicas, each of which shards the model; 1: each rank is a replica.
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
    """Rank ways to synchronise replicas, and a single replica, by the time of a sample.

    Options count as predicted: without overlap, a ratio is not a measurement of a step.

    Args:
        count: number of replicas.
    """

    def option(position: int, offer: Replicas) -> Option:
        step = Ratio((1 + offer.ratio) / count, math.nan, math.nan)
        return Option(
            offer.name,
            step,
            devices=count,
            measured=False,
            lossless=not offer.lossy,
            simplicity=position,
        )

    single = Option(ALONE, Ratio(1.0, math.nan, math.nan), measured=False)
    options = [option(position, offer) for position, offer in enumerate(offers)]
    return rank(options, [single], tolerance=0.0)


def advice(
    link: str,
    count: int,
    times: Mapping[str, Times],
    gradient_bytes: int,
    computation_name: str,
    computation: Times,
    sharded: bool = False,
    asked: Mapping[str, tuple[CanonicalStrategy, Times]] | None = None,
) -> str:
    """Return a table of the costs of ways to synchronise replicas, and which one to use.

    Args:
        link: name of the link.
        count: number of replicas.
        times: times of an all-reduce of the gradient, by `STOCK` and codec, the strongest last.
        gradient_bytes: bytes that each rank reduces over the link.
        computation_name: heading of the line with the computation.
        computation: times of the computation of a step.
        sharded: whether each replica shards the model; otherwise each rank is a replica.
        asked: strategies of the user, each with the times of one synchronisation.
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
        f"  {computation_name} {computation}",
        f"  {'':{width}}    ratio  of step     gain     even",
    ]
    for offer in offers:
        part = f"{100 * offer.ratio / (1 + offer.ratio):.1f} %"
        gain = count / (1 + offer.ratio)
        pays = f" {even[offer.name]:8.2f}" if offer.name in even else ""
        lines.append(f"  {offer.name:{width}} {offer.ratio:8.3g} {part:>8} {gain:8.2f}{pays}")
    return "\n".join([*lines, *_uses({offer.name: offer for offer in offers}, ranking)])


def _uses(offers: Mapping[str, Replicas], ranking: Ranking) -> list[str]:
    """Return the option to use without loss, and one that may reach a loss sooner, with the lines
    of a script."""
    first = ranking.order[0]
    lines = [f"  without loss use {first.option.name}: {first.reason}"]
    if not ranking.gaining:
        return [*lines, "  nothing that changes training is faster"]
    name = ranking.gaining[0]
    even, script = ranking.break_even[name], offers[name].strategy.attach_call() or ""
    lines.append(
        f"  {name} reaches the same loss sooner if it needs fewer than {even:.2f} x the samples"
    )
    return [*lines, *(f"  {line}" for line in script.splitlines())]


LEGEND = """
of step: share of synchronisation in a step without overlap; backward may hide some of it
gain: samples per second, over one replica's at the speed that it has while all replicas compute
even: changes training; pays where it needs fewer than so many times the samples to reach a loss
Quality is not measured: experiments/islands/README.md has times to one loss of two replicas."""
