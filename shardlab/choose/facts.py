"""Facts that speak for an action of the search: what was measured of the incumbent, in words.

Each function returns one fact with its figures, or None where it does not hold.
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
"""shares of a step in waiting for communication"""
_MOSTLY = 0.3
"""share of the bytes"""
_CODING = 0.05
"""share of a step in encoding and decoding"""
_SMALL = 8
"""collectives per step from which on units may be merged"""
_LOSSY = 0.05
"""relative error of compressed gradients from which on error feedback may help"""
_NEARLY_FULL = 0.9
_HALF_EMPTY = 0.5
"""shares of the memory limit"""
_KINDS = ("gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Measurements of the incumbent; quality is that of training runs with its numerics.

    Times are in milliseconds, bytes are those of one rank and step.
    """

    source: str
    """race, timing or training runs of the incumbent that steps and bytes are of"""
    trained: str
    """whose training runs error and perplexity are of"""
    link: str
    """of the search"""
    step_ms: float
    """on the link of the search"""
    computing_ms: float
    """step without the communication that was not overlapped"""
    coding_ms: float
    """encoding and decoding"""
    collectives: float
    overlap: float
    """share of communication that was overlapped with computation"""
    backward: float
    """share of communication that was in backward"""
    asked: Mapping[str, float]
    """bytes that the engine asked to move, by kind: gradients, weights"""
    moved: Mapping[str, float]
    """bytes that were sent, by kind"""
    error: float | None
    """relative error of the compressed gradient; None: not audited"""
    perplexity_ratio: float
    """over the start's"""
    tolerance: float
    """largest relative rise of perplexity"""
    memory: float
    """peak of a rank over the limit"""

    @property
    def waits(self) -> float:
        """Share of the step that waits for communication."""
        return max(0.0, 1 - self.computing_ms / self.step_ms)

    @classmethod
    def of(
        cls,
        history: History,
        timed: Iterable[TimingResult],
        held_ms: float | None,
        memory: float,
        tolerance: float,
    ) -> "Facts":
        """Return the facts on the incumbent.

        Steps and bytes are those of its latest race or timing on the ranks of the search: on the
        link of the search, where there is one. Otherwise its training runs have them.

        Args:
            timed: all timings.
            held_ms: predicted step of the incumbent on the link of the search, of which its step
                elsewhere is a part; None: unknown.
            memory: peak of the incumbent over the limit.
        """
        source, runs = _runs_of_incumbent(history, timed)
        load, row = history.workload, _same_numerics(history)
        traces = [run.breakdown if isinstance(run, TimingResult) else run for run in runs]
        there = all((run.link, run.world_size) == (load.link, load.world_size) for run in runs)

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
            step_ms=step_ms if there or held_ms is None else held_ms,
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
    """Return what was measured of the steps of the incumbent, and its name in words.

    What is held was raced or timed on the ranks of the search, or is the start, which was trained.
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


def _same_numerics(history: History) -> StrategyResults:
    """Return the incumbent, if it was trained, or what was trained with its codecs and types and
    differs from it least."""
    held = history.incumbent_results.strategy
    numerics = Numerics.of(held)

    def distance(row: StrategyResults) -> tuple[bool, int, str]:
        other = row.strategy
        return other.engine != held.engine, len(differences(held, other)), row.hash

    trained = (row for row in history.measured.values() if row.trained)
    same = (row for row in trained if Numerics.of(row.strategy) == numerics)
    return min(same, key=distance, default=history.incumbent_results)


def exposed(facts: Facts) -> str | None:
    """The step waits for communication."""
    if facts.waits < _EXPOSED:
        return None
    return (
        f"{100 * facts.waits:.0f} % of a step of {facts.step_ms:.1f} ms on link {facts.link} waits "
        f"for communication ({facts.source})"
    )


def mostly_exposed(facts: Facts) -> str | None:
    """A large part of the step waits for communication."""
    return exposed(facts) if facts.waits >= _MOSTLY_EXPOSED else None


def gathers_exposed(facts: Facts) -> str | None:
    """The step waits, and parameters are gathered."""
    waits = exposed(facts)
    if waits is None or not facts.moved["weights"]:
        return None
    return f"{waits}; gathered parameters are {_share(facts, 'weights')} of its bytes"


def gathered_twice(facts: Facts) -> str | None:
    """The step waits, and parameters are gathered in backward, too."""
    waits = gathers_exposed(facts)
    return waits and f"{waits}; {100 * facts.backward:.0f} % of communication is in backward"


def many_collectives(facts: Facts) -> str | None:
    """The step waits for many collectives."""
    waits = exposed(facts)
    if waits is None or facts.collectives < _SMALL:
        return None
    return f"{waits}; {facts.collectives:.0f} collectives per step"


def no_overlap(facts: Facts) -> str | None:
    """The step waits, and less than half of communication overlaps with computation."""
    waits = exposed(facts)
    if waits is None or facts.overlap >= 0.5:
        return None
    return f"{waits}; {100 * facts.overlap:.0f} % of communication was overlapped"


def mostly(kind: str) -> Callable[[Facts], str | None]:
    """The step waits, and gradients or weights are a large part of the bytes."""

    def fact(facts: Facts) -> str | None:
        waits, least = exposed(facts), _MOSTLY * sum(facts.moved.values())
        if waits is None or not facts.moved[kind] or facts.moved[kind] < least:
            return None
        return f"{waits}; {kind} are {_share(facts, kind)} of its bytes"

    return fact


def moved_twice(facts: Facts) -> str | None:
    """The process group's reduce-scatter moves more than it was asked to, as gloo's does."""
    asked, moved = facts.asked["gradients"], facts.moved["gradients"]
    if not asked or moved < 1.2 * asked:
        return None
    return f"gradients of {asked / 1e6:.3f} MB moved as {moved / 1e6:.3f} MB ({facts.source})"


def coding(facts: Facts) -> str | None:
    """Codecs take time."""
    share = facts.coding_ms / facts.step_ms
    return f"coding takes {100 * share:.0f} % of a step" if share >= _CODING else None


def worse(facts: Facts) -> str | None:
    """Half of the tolerated rise of perplexity is spent."""
    if not facts.perplexity_ratio > 1 + facts.tolerance / 2:
        return None
    return f"perplexity is {facts.perplexity_ratio:.3f} times the start's ({facts.trained})"


def lossy(facts: Facts) -> str | None:
    """Compressed gradients are far from exact ones."""
    if facts.error is None or facts.error < _LOSSY:
        return None
    return f"compressed gradients are off by {100 * facts.error:.0f} % ({facts.trained})"


def full(facts: Facts) -> str | None:
    """Hardly any memory is left."""
    if facts.memory < _NEARLY_FULL:
        return None
    return f"the peak is {100 * facts.memory:.0f} % of the memory limit"


def half_empty(facts: Facts) -> str | None:
    """Much memory is left."""
    if facts.memory > _HALF_EMPTY:
        return None
    return f"the peak is {100 * facts.memory:.0f} % of the memory limit"


def _share(facts: Facts, kind: str) -> str:
    return f"{100 * facts.moved[kind] / sum(facts.moved.values()):.0f} %"
