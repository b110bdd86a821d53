"""Section on the search: what was predicted, raced and decided, round by round."""

from shardlab.report.evidence import Evidence
from shardlab.report.tables import (
    ABSENT,
    Section,
    Table,
    figure,
    make_table,
    percent,
    plural,
    within,
)
from shardlab.search.history import History
from shardlab.search.records import Candidate, Decision, Prediction, Space, StepRatio

_ROLES = {
    "incumbent": "incumbent",
    "start": "start",
    "judge": "judge's choice",
    "forecast": "forecast's first",
    "random": "drawn at random",
}


_NOTHING = "found nothing within the memory limit and keeps"


def search(evidence: Evidence) -> Section:
    """Show the result of the search and all its rounds."""
    history = evidence.history
    searches = _searches(history)
    questions = [_question(last or history, name) for name, last in searches.items()]
    return Section(
        "Strategy search",
        sentences=[*questions, outcome(history)],
        sections=[_round(entry) for entry in history.rounds],
    )


def outcome(history: History) -> str:
    """Return a sentence for each search on what is held after its rounds."""
    return " ".join(_outcome(history, name, last) for name, last in _searches(history).items())


def _searches(history: History) -> dict[str, Decision | None]:
    """Return the last decision of every search, by name."""
    return {history.search: None} | {entry.search: entry for entry in history.rounds}


def _outcome(history: History, name: str, last: Decision | None) -> str:
    own = [entry for entry in history.rounds if entry.search == name]
    accepted = sum(entry.decision == "accept" for entry in own)
    result = "recommends" if last is None or last.fits else _NOTHING
    held = history.measured[last.held] if last else history.held
    load = history.workload
    if last:
        load = load.model_copy(update={"link": last.link, "world_size": last.world_size})
    return (
        f"After {plural(len(own), 'round')}, {accepted} of which changed the incumbent, "
        f"the strategy search{_named(name)} {result}: {held.strategy.label()} "
        f"({held.source}){_of_start(held.step(load))}."
    )


def _named(search: str) -> str:
    return f" {search}" if search else ""


def _question(last: Decision | History, name: str) -> str:
    place = last if isinstance(last, Decision) else last.workload
    return (
        f"Which strategy has the shortest step on {plural(place.world_size, 'rank')} with "
        f"link {place.link}? The search{_named(name)} predicts every legal strategy, races "
        "a few and holds the fastest whose perplexity is tolerated."
    )


def _of_start(step: StepRatio | None) -> str:
    return f", step {_interval(step)} times the start's in {step.source}" if step else ""


def _round(entry: Decision) -> Section:
    return Section(
        f"Round {entry.round}{f' of {entry.search}' if entry.search else ''}: {entry.decision}",
        sentences=[
            *([_narrowed(entry.space)] if entry.space else []),
            f"Judge {entry.verdict.judge}: {entry.verdict.reason}.",
            *([_prompts(entry)] if entry.verdict.prompts else []),
            *([_raced(entry)] if entry.compared else []),
            f"Decision: {entry.decision}. {entry.reason}.",
            *entry.warnings,
        ],
        tables=[_race_table(entry)] if entry.compared else [],
        details=[
            Section(f"Shortlist of round {entry.round}", tables=[_shortlist(entry)]),
        ]
        if entry.candidates
        else [],
    )


def _narrowed(space: Space) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in space.unpredicted.items())
    return (
        f"{space.strategies:,} legal strategies: {space.beyond_memory:,} beyond the memory limit, "
        f"{space.spared:,} that save memory which is not needed, {space.predicted:,} predicted"
        f"{f', not predicted: {reasons}' if reasons else ''}; of these {space.known:,} were known "
        "already."
    )


def _prompts(entry: Decision) -> str:
    return f"Prompts to a language model, with the answers: {', '.join(entry.verdict.prompts)}."


def _raced(entry: Decision) -> str:
    return f"The trial took {entry.seconds:.0f} s; the race ended: {entry.stopped}."


def _race_table(entry: Decision) -> Table:
    rows = [
        [
            each.label,
            ", ".join(_ROLES[role] for role in each.roles),
            ABSENT if each.predicted_ms is None else f"{figure(each.predicted_ms)} ms",
            ABSENT if each.step is None else _interval(each.step),
            ABSENT if each.step is None else str(each.step.repetitions),
            ABSENT if each.perplexity_ratio is None else percent(each.perplexity_ratio - 1),
            "; ".join(each.objections) or "faster, and as good",
        ]
        for each in entry.compared
    ]
    headings = [
        "strategy",
        "raced as",
        "predicted step",
        "step over the incumbent's",
        "repetitions",
        "perplexity from the start's",
        "result",
    ]
    return make_table(f"Race of round {entry.round}", headings, rows, layout="text")


def _shortlist(entry: Decision) -> Table:
    rows = [
        [each.label, _step(each.prediction), _quality(each.prediction), each.why]
        for each in sorted(entry.candidates, key=_by_step)
    ]
    headings = ["strategy", "predicted step", "perplexity from the start's", "why"]
    return make_table(f"Shortlist of round {entry.round}", headings, rows, layout="text")


def _by_step(each: Candidate) -> tuple[float, str]:
    step = each.prediction.step_ms
    return float("inf") if step is None else step, each.id


def _step(prediction: Prediction) -> str:
    if prediction.step_ms is None or prediction.low_ms is None or prediction.high_ms is None:
        return f"{ABSENT} ({prediction.note})"
    return within(prediction.step_ms, prediction.low_ms, prediction.high_ms, 1, " ms")


def _quality(prediction: Prediction) -> str:
    ratio = prediction.perplexity_ratio
    return f"{ABSENT if ratio is None else percent(ratio - 1)} ({prediction.note})"


def _interval(step: StepRatio) -> str:
    return within(step.ratio, step.low, step.high, 3)
