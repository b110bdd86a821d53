"""Predictions: steps on clusters of thousands of ranks, and break-even link rates of codecs."""

import math
from collections.abc import Iterable, Sequence

from scipy.optimize import brentq

from shardlab.core.document import Document
from shardlab.predict.clusters import preset
from shardlab.predict.costs import MeasuredCosts, OnCluster
from shardlab.predict.machine import CodecLines
from shardlab.predict.model import Case, PerformanceModel, case_of
from shardlab.predict.step import StepWork, step_seconds
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.document import CanonicalStrategy, parse_strategy

ASSUMPTIONS = (
    "Weak scaling: every rank computes as many samples per step as here, and as fast as one rank "
    "by itself on this machine; codecs run as fast as here.",
    "Links are not measured but assumed: each preset names its rates, latencies and sources.",
    "Collectives are those of the libraries of such clusters, the fastest of ring, tree and two "
    "levels; reduce-scatter is a real one, not gloo's. Codecs exchange payloads all-to-all.",
    "Nothing else is on the network, no rank is later than the others, and no node fails.",
    "Of engines, what they compute for each collective is as here; what they wait for threads that "
    "share cores is left out.",
    "Intervals are those of predictions on this machine: they say nothing of these assumptions.",
)

_SLOWEST, _FASTEST = 6.0, 12.0
"""bounds of the searched link rates: logarithms of bits per second"""
_MESSAGE = 1 << 18
"""elements of a rank's part of the message for which codecs are compared"""


class Point(Document):
    """Prediction for one strategy on one cluster; times in milliseconds."""

    run: str
    link: str
    ranks: int
    step_ms: float
    low_ms: float
    high_ms: float
    compute_ms: float
    """of a step without communication"""

    @property
    def efficiency(self) -> float:
        """Return the throughput of a rank relative to one that does not communicate."""
        return self.compute_ms / self.step_ms


def extrapolate(
    runs: Iterable[TimingResult],
    model: PerformanceModel,
    links: Sequence[str],
    ranks: Sequence[int],
) -> list[Point]:
    """Predict every run on every cluster preset with every number of ranks that its codec allows.

    Raises:
        UserError: an unknown preset.
    """
    points = []
    for run in runs:
        case = case_of(run)
        work = with_own_cores(case, model)
        most = _most_ranks(case.strategy)
        for link in links:
            for count in ranks:
                if count <= most:
                    seconds = step_seconds(work, OnCluster(preset(link), count))
                    step_ms, low_ms, high_ms = (1e3 * s for s in model.interval(seconds))
                    points.append(
                        Point(
                            run=run.run,
                            link=link,
                            ranks=count,
                            step_ms=step_ms,
                            low_ms=low_ms,
                            high_ms=high_ms,
                            compute_ms=1e3 * sum(work.compute),
                        )
                    )
    return points


def _most_ranks(strategy: CanonicalStrategy) -> float:
    codecs = [strategy.gradients.codec, *([strategy.sync.codec] if strategy.sync else [])]
    return min(codec.most_ranks or math.inf for codec in codecs)


def with_own_cores(case: Case, model: PerformanceModel) -> StepWork:
    """Return the work of a step whose ranks have cores of their own."""
    compute = model.compute[min(model.compute)]
    return model.work(*case)._replace(compute=compute, wait_s=0.0)


class BreakEven(Document):
    """Break-even rates of one run with a codec, in bits per second."""

    run: str
    codec: str
    """codecs of gradients and of weights"""
    ratio: float
    """payload bytes over raw bytes of gradients"""
    exposed: float
    """for a fully exposed reduction of gradients, by `exposed_rate`"""
    step: float | None
    """for the whole step against the same strategy without codecs; None: the codec pays at every
    rate or at none"""
    always: bool
    """whether the codec pays at every rate, where `step` is None"""


def exposed_rate(codec: CodecLines, elements: float, ranks: int) -> float:
    """Return the bits per second at which a reduce-scatter of n elements takes equally long with
    and without the codec.

    (1 - r) (W - 1)/W 4 n / rate = encoding n + decoding n, with r payload bytes per raw byte: what
    fewer bytes save is what the codec costs.
    """
    own = elements / ranks
    saved = (4 * own - codec.payload.at(own)) * (ranks - 1)
    cost = ranks * (codec.encode.at(own) + codec.decode.at(own))
    return max(8 * saved / cost, 0.0)


def break_even(
    runs: Iterable[TimingResult], model: PerformanceModel, ranks: int = 2
) -> list[BreakEven]:
    """Return the break-even rates of every compressing run, for ranks with cores of their own."""
    rates = (_break_even(run, model, ranks) for run in runs)
    return [rate for rate in rates if rate is not None]


def _break_even(run: TimingResult, model: PerformanceModel, ranks: int) -> BreakEven | None:
    case = case_of(run)
    strategy, work = case.strategy, with_own_cores(case, model)
    lines = work.gradients.inside.codec or work.weights.codec
    if lines is None:
        return None
    names = [codec_text(strategy.gradients.codec)]
    names += [f"weights {codec_text(strategy.weights.codec)}"] if strategy.weights else []
    uncompressed = with_own_cores(case._replace(strategy=_without_codecs(strategy)), model)

    def gain(log_rate: float) -> float:
        costs = MeasuredCosts(
            model.machine, ranks, cores=ranks, bits_per_second=round(10**log_rate)
        )
        costs.rank = costs.rank._replace(bucket_s=0.0)  # which emulated links alone have
        return step_seconds(uncompressed, costs) - step_seconds(work, costs)

    always = gain(_FASTEST) >= 0
    crosses = gain(_SLOWEST) > 0 and not always
    step = 10 ** brentq(gain, _SLOWEST, _FASTEST, xtol=1e-9) if crosses else None
    return BreakEven(
        run=run.run,
        codec=", ".join(names),
        ratio=lines.payload.at(_MESSAGE) / (4 * _MESSAGE),
        exposed=exposed_rate(lines, ranks * _MESSAGE, ranks),
        step=step,
        always=always,
    )


def _without_codecs(strategy: CanonicalStrategy) -> CanonicalStrategy:
    """Return the same all-to-all route without a codec."""
    plain = {"gradients": {"codec": "none", "route": "exchange"}, "weights": None}
    return parse_strategy(strategy.model_dump(mode="json") | plain).canonical()
