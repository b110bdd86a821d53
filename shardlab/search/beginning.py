"""State in which a search begins: after the matrix and its timings, or after another search."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardlab.config.link import LOOPBACK
from shardlab.config.run_record import Record
from shardlab.config.schema import Train
from shardlab.config.search import Agent
from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.core.errors import UserError, nearest
from shardlab.search.history import (
    Ended,
    History,
    Measured,
    Workload,
    paired_steps,
    was_trained,
)
from shardlab.search.rounds import Measurement


def initial_history(
    records: Sequence[Record],
    timed: Iterable[TimedRun],
    agent: Agent,
    train: Train,
    search: str | None = None,
) -> History:
    """Return the state before the first round: all that was measured for this workload.

    The fastest admissible strategy is held, and the first race has to confirm it.

    Args:
        records: of the matrix.
        timed: of all timings; those with the ranks and the link of the search count.
        agent: settings of the search.
        search: its name, where it has one.

    Raises:
        UserError: no record of `agent.start`, or it diverged.
    """
    workload = _workload(records, agent, train)
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    if agent.start not in runs:
        raise UserError(
            f"agent.start: no record of run {agent.start!r}; {nearest(agent.start, runs)}"
        )
    # two names of one meaning are one strategy: name and figures of the start take precedence
    measured: dict[str, Measured] = {}
    for run in (agent.start, *runs):
        entry = _of_run(run, runs[run])
        measured.setdefault(entry.hash, entry)
    start = next(iter(measured.values()))
    if start.outcome != "ok":
        raise UserError(
            f"agent.start: run {agent.start!r} diverged ({start.detail}): name another run"
        )
    for entry in _of_timings(timed, start.hash, workload):
        known = measured.get(entry.hash, entry)
        steps = [*known.steps, *entry.steps] if known is not entry else entry.steps
        measured[entry.hash] = known.model_copy(update={"steps": steps})
    key = start.hash
    history = History(
        search=search or "", workload=workload, start=key, incumbent=key, measured=measured
    )
    return hold_fastest(history, agent)


def memory_limit(agent: Agent, workload: Workload) -> int:
    """Return the bytes that one rank may use: as given (1 GB = 10^9 B), or its part of the
    machine's."""
    if agent.memory_limit_gb is not None:
        return int(agent.memory_limit_gb * 1e9)
    return workload.memory_bytes


def hold_fastest(
    history: History, agent: Agent, predicted: Mapping[str, int] | None = None
) -> History:
    """Return the history with the fastest admissible strategy held, if its search has no round.

    Args:
        predicted: peaks by hash of what has none measured, bytes of a rank; without them only
            measured peaks are compared with the limit.
    """
    if history.own_rounds:
        return history
    limit = memory_limit(agent, history.workload)
    best = history.fastest(agent.quality_tolerance, limit, predicted or {})
    return history.model_copy(update={"incumbent": best.hash})


def known_before(after: str, results: str, first: History, agent: Agent) -> History:
    """Return the state that a round starts from: `first` (`after` is `results`), or a history.

    Where that is of another search, this one begins with its training runs and races.

    Raises:
        UserError: the earlier history lacks something of the first, so it is out of date.
    """
    if after == results:
        return first
    history = History.from_file(after, f"run python -m stages.decide {Path(after).parent.name}")
    same = history.search == first.search
    for key, entry in first.measured.items():
        if key not in history.measured and (same or entry.measurements):
            raise UserError(
                f"{after}: knows nothing of {entry.source} in {results}: repeat the earlier rounds"
            )
    return history if same else _follow(history, first, agent)


def _follow(before: History, first: History, agent: Agent) -> History:
    """Return the state in which a search begins after others.

    Steps and failures of races belong to a workload, which includes link and ranks; quality belongs
    to neither.
    """
    own = Ended(
        search=before.search, workload=before.workload, held=before.held, measured=before.measured
    )
    ended = [*before.ended, own]
    alike = [each.measured for each in ended if each.workload == first.workload]
    measured = {**first.measured, **(alike[-1] if alike else {})}
    for key, entry in before.measured.items():
        if was_trained(entry):
            fresh = entry.model_copy(update={"outcome": "ok", "detail": "", "steps": []})
            update: dict[str, object] = {"measurements": entry.measurements}
            if entry.outcome == "diverged":
                update |= {"outcome": entry.outcome, "detail": entry.detail}
            measured[key] = measured.get(key, fresh).model_copy(update=update)
    shared = {"rounds": before.rounds, "races": before.races, "ended": ended}
    return hold_fastest(first.model_copy(update={**shared, "measured": measured}), agent)


def _of_run(run: str, records: list[Record]) -> Measured:
    strategy = parse_strategy(records[0].strategy, f"strategy of run {run}")
    records = sorted(records, key=lambda record: record.seed)
    diverged = [f"seed {each.seed}: {each.divergence}" for each in records if each.divergence]
    return Measured(
        strategy=strategy.canonical(),
        hash=strategy.hash(),
        source=f"run {run}",
        outcome="diverged" if diverged else "ok",
        detail="; ".join(diverged),
        measurements=[] if diverged else [Measurement.of(each) for each in records],
    )


def _of_timings(timed: Iterable[TimedRun], start: str, workload: Workload) -> list[Measured]:
    """Return the steps of every strategy that was timed with the start, as this search would."""
    timings: dict[str, list[TimedRun]] = {}
    for run in timed:
        if (run.world_size, run.link) == (workload.world_size, workload.link):
            timings.setdefault(run.timing, []).append(run)
    found = []
    for name, runs in timings.items():
        reference = next((run for run in runs if run.strategy_hash == start), None)
        for run in runs:
            if reference is None or run.run == NO_COMMUNICATION:
                continue
            strategy = parse_strategy(run.strategy, f"strategy of {run.run} in timing {name}")
            found.append(
                Measured(
                    strategy=strategy.canonical(),
                    hash=strategy.hash(),
                    source=f"timing {name}",
                    steps=[paired_steps(run.step_ms, reference.step_ms, f"timing {name}")],
                )
            )
    return found


def _workload(records: Sequence[Record], agent: Agent, train: Train) -> Workload:
    """Return what the records trained, on the link of the search.

    Raises:
        UserError: there are none, or they are of different workloads.
    """
    if not records:
        raise UserError("results: no record: train the matrix first")
    names = [name for name in Workload.model_fields if name in Record.model_fields]
    for record in records:
        for name in names:
            if getattr(record, name) != getattr(records[0], name):
                raise UserError(
                    f"results: run {record.run!r} trained another workload than "
                    f"{records[0].run!r}: collect the results again"
                )
    link, trained_on = agent.link or train.link, records[0].world_size
    ranks = agent.world_size or trained_on
    own = {
        "link": LOOPBACK if link is None else link.name,
        "world_size": ranks,
        "trained_on": trained_on,
        "memory_bytes": records[0].host["memory_bytes"] // ranks,
    }
    return Workload(**{name: getattr(records[0], name) for name in names} | own)
