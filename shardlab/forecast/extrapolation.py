"""Predicted steps of every strategy on clusters of thousands of ranks, with their assumptions."""

from collections.abc import Iterable, Sequence

from shardlab.core.document import Document
from shardlab.forecast.costs import OnCluster
from shardlab.forecast.model import Model, strategy_of
from shardlab.forecast.presets import preset
from shardlab.forecast.step import step_seconds
from shardlab.forecast.uncertainty import estimate
from shardlab.forecast.work import Work
from shardlab.records.timing import NO_COMMUNICATION, TimedRun

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
    """Predict every run on every cluster preset with every number of ranks.

    Raises:
        UserError: an unknown preset.
    """
    return [_point(run, model, link, count) for run in runs for link in links for count in ranks]


def _point(run: TimedRun, model: Model, link: str, ranks: int) -> Point:
    costs = OnCluster(preset(link), ranks)
    found = estimate(lambda other: step_seconds(by_itself(run, other), costs), model)
    return Point(
        run=run.run,
        link=link,
        ranks=ranks,
        step_ms=1e3 * found.value,
        low_ms=1e3 * found.low,
        high_ms=1e3 * found.high,
        compute_ms=1e3 * sum(by_itself(run, model).compute),
    )


def by_itself(run: TimedRun, model: Model) -> Work:
    """Return the work of a step of a run whose ranks have cores of their own."""
    work = model.work(run, strategy_of(run))
    compute = model.compute[min(model.compute)]
    return work._replace(compute=compute, overhead=work.overhead._replace(wait=0.0))


def first_of_each(timings: Iterable[TimedRun], left_out: Iterable[str]) -> list[TimedRun]:
    """Return one timed run of each strategy that the model can predict."""
    found: dict[str, TimedRun] = {}
    for run in timings:
        if run.run != NO_COMMUNICATION and run.run not in left_out:
            found.setdefault(run.run, run)
    return list(found.values())
