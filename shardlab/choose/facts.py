"""Facts that speak for an action of the search: measurements of the incumbent, in words.

Each function returns one fact with its figures, or None where the fact does not hold.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardlab.choose.history import History, Numerics, mean_ratio
from shardlab.results.table import StrategyResults
from shardlab.results.timing_result import TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import differences

_EXPOSED = 0.1
_MOSTLY_EXPOSED = 0.3
"""Thresholds for the share of a step that waits for communication."""
_MOSTLY = 0.3
"""Threshold for the share of the bytes."""
_CODING = 0.05
"""Threshold for the share of a step in encoding and decoding."""
_SMALL = 8
"""Number of collectives per step above which units may be merged."""
_LOSSY = 0.05
"""Relative error of compressed gradients above which error feedback may help."""
_NEARLY_FULL = 0.9
_HALF_EMPTY = 0.5
"""Thresholds for the peak over the memory limit."""
_KINDS = ("gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of the incumbent; error and perplexity come from training runs with its
    numerics.

    Times are in milliseconds; bytes are per rank and step.
    """

    source: str
    """Race, timing or training runs of the incumbent that gave the step and the bytes."""
    trained: str
    """Training runs that gave error and perplexity, in words."""
    link: str
    """Link of the search."""
    step_ms: float
    """Step on the link of the search."""
    computing_ms: float
    """Step without its exposed communication."""
    coding_ms: float
    """Encoding and decoding."""
    collectives: float
    overlap: float
    """Share of communication that was overlapped with computation."""
    backward: float
    """Share of communication that was in backward."""
    asked: Mapping[str, float]
    """Bytes that the engine asked to move, by kind: gradients, weights."""
    moved: Mapping[str, float]
    """Bytes that were sent, by kind."""
    error: float | None
    """Relative error of the compressed gradient; None: not audited."""
    perplexity_ratio: float
    """Perplexity over the start's."""
    tolerance: float
    """Largest relative rise of perplexity."""
    memory: float
    """Peak of a rank over the limit."""

    @property
    def waits(self) -> float:
        """Share of the step that waits for communication."""
        return max(0.0, 1 - self.computing_ms / self.step_ms)

    @classmethod
    def of(
        cls,
        history: History,
        timed: Iterable[TimingResult],
        incumbent_ms: float | None,
        memory: float,
        tolerance: float,
    ) -> "Measurements":
        """Return the measurements of the incumbent.

        Its latest race or timing on the ranks of the search gives steps and bytes. A race or timing
        on the link of the search takes precedence. Without any, its training runs give them.

        Args:
            timed: all timings.
            incumbent_ms: predicted step of the incumbent on the link of the search, which replaces
                a step that was measured elsewhere; None: unknown.
            memory: peak of the incumbent over the limit.
        """
        source, runs = _runs_of_incumbent(history, timed)
        load, row = history.workload, _nearest_trained(history)
        traces = [run.breakdown if isinstance(run, TimingResult) else run for run in runs]
        on_link = all((run.link, run.world_size) == (load.link, load.world_size) for run in runs)

        def mean(field: str) -> float:
            return fmean(getattr(trace, field) for trace in traces)

        def of_kind(kind: str, field: str) -> float:
            return fmean(run.ledger[kind][field] for run in runs)

        errors = [run.grad_rel_error for run in row.trained if run.grad_rel_error is not None]
        backward, communication = mean("backward_comm_ms"), mean("comm_ms_per_step")
        step_ms = mean("profiled_step_ms")
        return cls(
            source=source,
            trained="its training runs" if row is history.incumbent_results else row.source,
            link=load.link,
            step_ms=step_ms if on_link or incumbent_ms is None else incumbent_ms,
            computing_ms=step_ms - mean("exposed_comm_ms"),
            coding_ms=1e3 * sum(of_kind(k, t) for k in _KINDS for t in ("encode_s", "decode_s")),
            collectives=sum(of_kind(kind, "collectives") for kind in _KINDS),
            overlap=mean("overlap"),
            backward=backward / communication if communication else 0.0,
            asked={kind: of_kind(kind, "bytes_raw") for kind in _KINDS},
            moved={kind: of_kind(kind, "bytes_wire") for kind in _KINDS},
            error=fmean(errors) if errors else None,
            perplexity_ratio=mean_ratio(row.trained, history.start_results.trained),
            tolerance=tolerance,
            memory=memory,
        )


def _runs_of_incumbent(
    history: History, timed: Iterable[TimingResult]
) -> tuple[str, Sequence[TimingResult | TrainResult]]:
    """Return the name, in words, of the runs that measured steps of the incumbent, and the runs.

    An incumbent was raced or timed on the ranks of the search, or it is the start, which was
    trained.
    """
    load = history.workload
    raced = [(f"its race {name}", run) for name, runs in history.races.items() for run in runs]
    measured = [
        (source, run)
        for source, run in (*((f"its timing {run.timing}", run) for run in timed), *raced)
        if (run.strategy_hash, run.world_size) == (history.incumbent, load.world_size)
        and run.accumulation == load.accumulation
    ]
    on_link = [(source, run) for source, run in measured if run.link == load.link]
    if not measured:
        return "its training runs", history.incumbent_results.trained
    source, run = (on_link or measured)[-1]
    return source, [run]


def _nearest_trained(history: History) -> StrategyResults:
    """Return the trained strategy with the incumbent's numerics that differs from it least: the
    incumbent itself, if it was trained."""
    incumbent = history.incumbent_results.strategy
    numerics = Numerics.of(incumbent)

    def distance(row: StrategyResults) -> tuple[bool, int, str]:
        strategy = row.strategy
        fields = differences(incumbent, strategy)
        return strategy.engine != incumbent.engine, len(fields), row.hash

    trained = (row for row in history.measured.values() if row.trained)
    candidates = (row for row in trained if Numerics.of(row.strategy) == numerics)
    return min(candidates, key=distance, default=history.incumbent_results)


def exposed(measured: Measurements) -> str | None:
    """The step waits for communication."""
    if measured.waits < _EXPOSED:
        return None
    return (
        f"{100 * measured.waits:.0f} % of a step of {measured.step_ms:.1f} ms on link "
        f"{measured.link} waits for communication ({measured.source})"
    )


def mostly_exposed(measured: Measurements) -> str | None:
    """A large part of the step waits for communication."""
    return exposed(measured) if measured.waits >= _MOSTLY_EXPOSED else None


def gathers_exposed(measured: Measurements) -> str | None:
    """The step waits, and parameters are gathered."""
    waits = exposed(measured)
    if waits is None or not measured.moved["weights"]:
        return None
    return f"{waits}; gathered parameters are {_share(measured, 'weights')} of its bytes"


def gathered_twice(measured: Measurements) -> str | None:
    """The step waits, and parameters are gathered again in backward."""
    waits = gathers_exposed(measured)
    return waits and f"{waits}; {100 * measured.backward:.0f} % of communication is in backward"


def many_collectives(measured: Measurements) -> str | None:
    """The step waits for many collectives."""
    waits = exposed(measured)
    if waits is None or measured.collectives < _SMALL:
        return None
    return f"{waits}; {measured.collectives:.0f} collectives per step"


def no_overlap(measured: Measurements) -> str | None:
    """The step waits, and less than half of communication overlaps with computation."""
    waits = exposed(measured)
    if waits is None or measured.overlap >= 0.5:
        return None
    return f"{waits}; {100 * measured.overlap:.0f} % of communication was overlapped"


def mostly(kind: str) -> Callable[[Measurements], str | None]:
    """The step waits, and gradients or weights are a large part of the bytes."""

    def fact(measured: Measurements) -> str | None:
        waits, threshold = exposed(measured), _MOSTLY * sum(measured.moved.values())
        if waits is None or not measured.moved[kind] or measured.moved[kind] < threshold:
            return None
        return f"{waits}; {kind} are {_share(measured, kind)} of its bytes"

    return fact


def moved_twice(measured: Measurements) -> str | None:
    """The process group's reduce-scatter moves more than it was asked to, as gloo's does."""
    asked, moved = measured.asked["gradients"], measured.moved["gradients"]
    if not asked or moved < 1.2 * asked:
        return None
    return f"gradients of {asked / 1e6:.3f} MB moved as {moved / 1e6:.3f} MB ({measured.source})"


def coding(measured: Measurements) -> str | None:
    """Codecs take time."""
    share = measured.coding_ms / measured.step_ms
    return f"coding takes {100 * share:.0f} % of a step" if share >= _CODING else None


def worse(measured: Measurements) -> str | None:
    """Half of the tolerated rise of perplexity is spent."""
    if not measured.perplexity_ratio > 1 + measured.tolerance / 2:
        return None
    return f"perplexity is {measured.perplexity_ratio:.3f} times the start's ({measured.trained})"


def lossy(measured: Measurements) -> str | None:
    """Compressed gradients are far from exact ones."""
    if measured.error is None or measured.error < _LOSSY:
        return None
    return f"compressed gradients are off by {100 * measured.error:.0f} % ({measured.trained})"


def full(measured: Measurements) -> str | None:
    """Hardly any memory is left."""
    if measured.memory < _NEARLY_FULL:
        return None
    return f"the peak is {100 * measured.memory:.0f} % of the memory limit"


def half_empty(measured: Measurements) -> str | None:
    """Much memory is left."""
    if measured.memory > _HALF_EMPTY:
        return None
    return f"the peak is {100 * measured.memory:.0f} % of the memory limit"


def _share(measured: Measurements, kind: str) -> str:
    return f"{100 * measured.moved[kind] / sum(measured.moved.values()):.0f} %"
