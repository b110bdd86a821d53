"""Predictions: steps on clusters of thousands of ranks, and break-even link rates of codecs."""

from collections.abc import Callable, Iterable, Sequence

from shardlab.config.codec_table import codec_text
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import TimedRun
from shardlab.core.document import Document
from shardlab.forecast.costs import Measured, OnCluster
from shardlab.forecast.machine import CodecLines
from shardlab.forecast.model import Model
from shardlab.forecast.presets import preset
from shardlab.forecast.step import step_seconds
from shardlab.forecast.uncertainty import propagate
from shardlab.forecast.work import Work
from shardlab.forecast.workload import Case, case_of, strategy_of

ASSUMPTIONS = (
    "Weak scaling: every rank computes as many samples per step as here, and as fast as one rank "
    "by itself on this machine; codecs run as fast as here and take turns with computation.",
    "Links are not measured but assumed: each preset names its rates, latencies and sources.",
    "Collectives are those of the libraries of such clusters, the fastest of ring, tree and two "
    "levels; reduce-scatter is a real one, not gloo's. Codecs exchange payloads all-to-all.",
    "Two collectives under way share the network of a rank; nothing else is on it, no rank is "
    "later than the others, and no node fails.",
    "Copies, updates and disks of slide go at the rates of the preset; they take nothing from "
    "computation or from each other, and gradients are clipped.",
    "Of engines, what they compute for each collective is as here; what they wait for threads that "
    "share cores is left out.",
    "Intervals carry the covariances of the fits to codecs, engines and computation: they say "
    "nothing of the assumptions above.",
)

SLOWEST, FASTEST = 1e6, 1e12
"""bounds of the searched link rates, bits per second"""
_MESSAGE = 1 << 18
"""elements of a rank's part of the message for which codecs are compared"""
_HALVINGS = 40


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
    runs: Iterable[TimedRun], model: Model, links: Sequence[str], ranks: Sequence[int]
) -> list[Point]:
    """Predict every run on every cluster preset with every number of ranks that its codec allows.

    Raises:
        UserError: an unknown preset.
    """
    return [
        _point(run.run, case_of(run), model, link, count)
        for run in runs
        for link in links
        for count in ranks
        if count <= (strategy_of(run).gradients.codec.most_ranks or count)
    ]


def _point(run: str, case: Case, model: Model, link: str, ranks: int) -> Point:
    costs = OnCluster(preset(link), ranks)
    found = propagate(lambda other: step_seconds(by_itself(case, other), costs), model)
    return Point(
        run=run,
        link=link,
        ranks=ranks,
        step_ms=1e3 * found.value,
        low_ms=1e3 * found.low,
        high_ms=1e3 * found.high,
        compute_ms=1e3 * sum(by_itself(case, model).compute),
    )


def by_itself(case: Case, model: Model) -> Work:
    """Return the work of a step whose ranks have cores of their own."""
    work = model.work(*case)
    compute = model.compute[min(model.compute)]
    return work._replace(compute=compute, overhead=work.overhead._replace(wait=0.0))


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
    """for the whole step, by simulation, against the same strategy without codecs; None: the codec
    pays at every rate or at none"""
    always: bool
    """whether the codec pays at every rate, where `step` is None"""


def exposed_rate(codec: CodecLines, elements: float, ranks: int) -> float:
    """Return the bits per second at which a reduce-scatter of n elements takes equally long with
    and without the codec.

    (1 - r) (W - 1)/W 4 n / rate = encoding n + decoding n, with r payload bytes per raw byte: what
    fewer bytes save is what the codec costs.
    """
    each = elements / ranks
    saved = (4 * each - codec.payload.at(each)) * (ranks - 1)
    cost = ranks * (codec.encode.at(each) + codec.decode.at(each))
    return max(8 * saved / cost, 0.0)


def break_even(runs: Iterable[TimedRun], model: Model, ranks: int = 2) -> list[BreakEven]:
    """Return the break-even rates of every compressing run, for ranks with cores of their own."""
    found = (_break_even(run, model, ranks) for run in runs)
    return [each for each in found if each is not None]


def _break_even(run: TimedRun, model: Model, ranks: int) -> BreakEven | None:
    case = case_of(run)
    strategy, work = case.strategy, by_itself(case, model)
    lines = work.gradients.inside.codec or work.weights.codec
    if lines is None:
        return None
    names = [codec_text(strategy.gradients.codec)]
    names += [f"weights {codec_text(strategy.weights.codec)}"] if strategy.weights else []
    bare = by_itself(case._replace(strategy=_without_codecs(strategy)), model)
    step, always = _crossing(lambda rate: _gain(work, bare, model, ranks, rate))
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


def _gain(work: Work, bare: Work, model: Model, ranks: int, rate: float) -> float:
    """Return the seconds per step that the codecs save on a link of a given rate."""
    costs = Measured(model.machine, ranks, cores=ranks, bits_per_second=round(rate))
    with_codecs, without = (step_seconds(each, costs) for each in (work, bare))
    return without - with_codecs


def _crossing(gain: Callable[[float], float]) -> tuple[float | None, bool]:
    """Return the rate at which the gain changes sign, or whether it is positive everywhere."""
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0 or gain(high) >= 0:
        return None, gain(high) >= 0
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low, False
