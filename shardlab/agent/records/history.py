"""State of the search: the incumbent, everything measured so far, and the rounds."""

from shardlab.agent.records.rounds import Measurement, Outcome, Round
from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest
from shardlab.records.run import Record
from shardlab.strategy.strategy import CanonicalStrategy, parse_strategy


class Workload(Document):
    """Workload that every strategy of one search trains."""

    model: str
    parameters: int
    world_size: int
    sequence_length: int
    batch_size: int
    accumulation: int
    link: str


class Measured(Document):
    """A strategy that was tried, and its outcome."""

    strategy: CanonicalStrategy
    """in canonical form"""
    hash: str
    source: str
    """`run NAME` of the matrix, or `round K`"""
    outcome: Outcome = "ok"
    detail: str = ""
    measurements: list[Measurement]
    """by seed; empty when the trial failed"""

    def mean(self, field: str) -> float:
        """Return the mean of a measurement's field over the seeds of a strategy that succeeded."""
        values: list[float] = [getattr(each, field) for each in self.measurements]
        return sum(values) / len(values)


class History(Document):
    """Everything that the search knows between two rounds."""

    workload: Workload
    start: str
    """hash of the strategy that the search started from: the reference for quality"""
    incumbent: Measured
    measured: dict[str, Measured]
    """by hash of the strategy"""
    rounds: list[Round] = []

    def succeeded(self) -> list[Measured]:
        """Return the strategies with measurements, in the order of their hashes."""
        return [entry for _, entry in sorted(self.measured.items()) if entry.outcome == "ok"]


def initial_history(records: list[Record], start_run: str) -> History:
    """Return the state before the first round: every strategy of the matrix counts as measured.

    Args:
        records: of the matrix.
        start_run: run whose strategy is the first incumbent.

    Raises:
        UserError: no record of `start_run`, or records of different workloads.
    """
    _check_workload(records)
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    if start_run not in runs:
        raise UserError(f"agent.start: no record of run {start_run!r}; {nearest(start_run, runs)}")
    # two names of one meaning are one strategy: name and figures of the start take precedence
    order = [start_run, *(run for run in runs if run != start_run)]
    measured: dict[str, Measured] = {}
    for run in order:
        entry = _of_run(run, runs[run])
        measured.setdefault(entry.hash, entry)
    incumbent = _of_run(start_run, runs[start_run])
    return History(
        workload=_workload(records[0]),
        start=incumbent.hash,
        incumbent=incumbent,
        measured=measured,
    )


def known_before(after: str, results: str, records: list[Record], start_run: str) -> History:
    """Return the state that a round starts from: the matrix (`after` is `results`), or a history.

    Raises:
        UserError: the earlier history lacks a strategy of the matrix, so it is out of date.
    """
    first = initial_history(records, start_run)
    if after == results:
        return first
    history = History.from_file(after)
    for key, entry in first.measured.items():
        if key not in history.measured:
            raise UserError(
                f"{after}: knows nothing of {entry.source} in {results}: repeat the earlier rounds"
            )
    return history


def _of_run(run: str, records: list[Record]) -> Measured:
    strategy = parse_strategy(records[0].strategy, f"strategy of run {run}")
    return Measured(
        strategy=strategy.canonical(),
        hash=strategy.hash(),
        source=f"run {run}",
        measurements=[Measurement.of(each) for each in sorted(records, key=lambda r: r.seed)],
    )


def _workload(record: Record) -> Workload:
    return Workload(**{name: getattr(record, name) for name in Workload.model_fields})


def _check_workload(records: list[Record]) -> None:
    if not records:
        raise UserError("results: no record: train the matrix first")
    for record in records:
        if _workload(record) != _workload(records[0]):
            raise UserError(
                f"results: run {record.run!r} trained another workload than "
                f"{records[0].run!r}: collect the results again"
            )
