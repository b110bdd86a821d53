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
from shardlab.search.history import Ended, History, Measured
from shardlab.search.rounds import Candidate, Prediction, Round, Space, StepRatio

_ROLES = {
    "incumbent": "incumbent",
    "start": "start",
    "judge": "judge's choice",
    "forecast": "forecast's first",
    "random": "drawn at random",
}


def search(evidence: Evidence) -> Section:
    """Show the result of the search and all its rounds."""
    history = evidence.history
    return Section(
        "Strategy search",
        sentences=[*map(_question, _searches(history)), outcome(history)],
        sections=[_round(entry) for entry in history.rounds],
    )


def outcome(history: History) -> str:
    """Return a sentence for each search on what is held after its rounds."""
    return " ".join(_outcome(history.rounds, each) for each in _searches(history))


def _searches(history: History) -> list[Ended]:
    """Return all searches, the last one included."""
    last = Ended(search=history.search, workload=history.workload, held=history.held)
    return [*history.ended, last]


def _outcome(rounds: list[Round], search: Ended) -> str:
    own = [entry for entry in rounds if entry.search == search.search]
    accepted = sum(entry.decision == "accept" for entry in own)
    fits = not own or own[-1].fits
    result = "recommends" if fits else "found nothing within the memory limit and keeps"
    return (
        f"After {plural(len(own), 'round')}, {accepted} of which changed the incumbent, "
        f"the strategy search{_named(search.search)} {result}: {search.held.strategy.label()} "
        f"({search.held.source}){_of_start(search.held)}."
    )


def _named(search: str) -> str:
    return f" {search}" if search else ""


def _question(search: Ended) -> str:
    load = search.workload
    return (
        f"Which strategy has the shortest step on {plural(load.world_size, 'rank')} with "
        f"link {load.link}? The search{_named(search.search)} predicts every legal strategy, races "
        "a few and holds the fastest whose perplexity is tolerated."
    )


def _of_start(entry: Measured) -> str:
    if not entry.steps:
        return ""
    return f", step {_interval(entry.steps[-1])} times the start's in {entry.steps[-1].source}"


def _round(entry: Round) -> Section:
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


def _prompts(entry: Round) -> str:
    return (
        f"{plural(entry.verdict.prompts, 'prompt')} to a language model, probes included, with the "
        f"answers: results/rounds/{entry.round}/conversation.json."
    )


def _raced(entry: Round) -> str:
    return f"The trial took {entry.seconds:.0f} s; the race ended: {entry.stopped}."


def _race_table(entry: Round) -> Table:
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


def _shortlist(entry: Round) -> Table:
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
