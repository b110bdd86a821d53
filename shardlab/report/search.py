"""The strategy search as a person reads it: each round with its reasons."""

from dataclasses import dataclass

from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Candidate, Comparison, Refused, Round
from shardlab.report.numbers import percent, within
from shardlab.report.tables import Table, text_table


@dataclass(frozen=True)
class RoundStory:
    """One round in words. A text may come from a judge or a crash: whoever shows it escapes it."""

    number: int
    tried: str
    judge: str
    why: str
    trial: str
    decision: str
    reason: str
    candidates: list[Candidate]
    refused: list[Refused]


def outcome(history: History) -> str:
    """One sentence: what the search holds after its rounds."""
    count = len(history.rounds)
    accepted = sum(entry.decision == "accept" for entry in history.rounds)
    return (
        f"After {count} {'round' if count == 1 else 'rounds'}, of which {accepted} changed the "
        f"incumbent, the strategy search holds: {history.incumbent.strategy.label()} "
        f"({history.incumbent.source})."
    )


def stories(history: History) -> list[RoundStory]:
    """The rounds in their order."""
    return [_story(entry) for entry in history.rounds]


def rounds_table(history: History) -> Table:
    """One row per round."""
    headings = ["round", "tried", "why", "judge", "trial", "decision", "reason"]
    rows = [
        [str(s.number), s.tried, s.why, s.judge, s.trial, s.decision, s.reason]
        for s in stories(history)
    ]
    return text_table("Strategy search", headings, rows)


def _story(entry: Round) -> RoundStory:
    return RoundStory(
        number=entry.round,
        tried=entry.trial.label or "nothing: the judge abstained or nothing was left to try",
        judge=entry.verdict.judge,
        why=entry.verdict.reason,
        trial=_trial(entry),
        decision=entry.decision,
        reason=entry.reason,
        candidates=entry.candidates,
        refused=entry.refused,
    )


def _trial(entry: Round) -> str:
    words = {
        "ok": "finished",
        "timeout": "ran past its time limit",
        "crash": "crashed",
        "memory": "ran out of memory",
        "none": "nothing ran",
    }
    parts = [words[entry.trial.outcome], entry.trial.detail]
    if entry.comparison is not None:
        parts.append(_compared(entry.comparison))
    return "; ".join(filter(None, parts))


def _compared(comparison: Comparison) -> str:
    low, high = comparison.interval or (float("nan"), float("nan"))
    ratio = within(comparison.step_ratio, low, high, 2)
    seeds = "1 seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds"
    return (
        f"median step {ratio} times the incumbent's over {seeds}, perplexity "
        f"{percent(comparison.perplexity_ratio - 1)} from the start's, peak memory "
        f"{comparison.memory_peak_bytes / 1e6:,.0f} MB"
    )
