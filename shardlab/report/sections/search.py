"""Section on the strategy search: each round with its reasons."""

from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Comparison, Round
from shardlab.report.evidence import Evidence
from shardlab.report.numbers import percent, plural, within
from shardlab.report.section import Section
from shardlab.report.tables import fact_table

_OUTCOMES = {
    "ok": "finished",
    "timeout": "exceeded its time limit",
    "crash": "crashed",
    "memory": "ran out of memory",
    "none": "no trial ran",
}


def search(evidence: Evidence) -> Section:
    """Show the result of the search and all its rounds."""
    history = evidence.history
    return Section(
        "Strategy search",
        sentences=[outcome(history)],
        sections=[_round(entry) for entry in history.rounds],
    )


def outcome(history: History) -> str:
    """Return a sentence on the incumbent after all rounds."""
    accepted = sum(entry.decision == "accept" for entry in history.rounds)
    return (
        f"After {plural(len(history.rounds), 'round')}, {accepted} of which changed the incumbent, "
        f"the strategy search recommends: {history.incumbent.strategy.label()} "
        f"({history.incumbent.source})."
    )


def _round(entry: Round) -> Section:
    title = f"Round {entry.round}: {entry.decision}"
    tried = entry.trial.label or "no strategy: the judge abstained or no candidate was left"
    rows = [
        ("trial of", tried),
        ("reason", f"{entry.verdict.reason} ({entry.verdict.judge})"),
        ("result", _result(entry)),
        ("decision", f"{entry.decision}: {entry.reason}"),
    ]
    lists = {
        "Candidates": [f"{each.label}: {each.why}" for each in entry.candidates],
        "Refused by validation": [f"{each.label}: {each.reason}" for each in entry.refused],
    }
    return Section(
        title,
        tables=[fact_table(title, rows)],
        details=[
            Section(f"{name}: {len(items)}", items=items) for name, items in lists.items() if items
        ],
    )


def _result(entry: Round) -> str:
    parts = [_OUTCOMES[entry.trial.outcome], entry.trial.detail]
    if entry.comparison is not None:
        parts.append(_compared(entry.comparison))
    return "; ".join(filter(None, parts))


def _compared(comparison: Comparison) -> str:
    low, high = comparison.interval or (float("nan"), float("nan"))
    ratio = within(comparison.step_ratio, low, high, 2)
    return (
        f"median step {ratio} times the incumbent's over {plural(comparison.seeds, 'seed')}, "
        f"perplexity {percent(comparison.perplexity_ratio - 1)} from the start's, peak memory "
        f"{comparison.memory_peak_bytes / 1e6:,.0f} MB"
    )
