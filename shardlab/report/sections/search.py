"""Section on the search: what was predicted, raced and decided, round by round."""

from shardlab.choose.history import History
from shardlab.choose.records import Comparison, Decision, Narrowing
from shardlab.core.numbers import ABSENT, figure, fixed, percent, plural
from shardlab.report.evidence import Evidence
from shardlab.report.tables import Section, Table, make_table
from shardlab.results.table import StepRatio

_ROLES = {
    "incumbent": "incumbent",
    "start": "start",
    "judge": "judge's choice",
    "forecast": "forecast's first",
    "random": "drawn at random",
}


def search(evidence: Evidence) -> Section | None:
    """Show the result of the search and all its rounds; None of an experiment without a search."""
    history = evidence.history
    if not evidence.is_searched:
        return None
    questions = [_question(last or history, name) for name, last in _searches(history).items()]
    return Section(
        "Strategy search",
        sentences=[*questions, outcome(history)],
        sections=[_round(decision) for decision in history.rounds],
    )


def outcome(history: History) -> str:
    """Return a sentence for each search on what is held after its rounds."""
    return " ".join(_outcome(history, name, last) for name, last in _searches(history).items())


def _searches(history: History) -> dict[str, Decision | None]:
    """Return the last decision of every search, by name."""
    return {history.search: None} | {decision.search: decision for decision in history.rounds}


def _outcome(history: History, name: str, last: Decision | None) -> str:
    decisions = [decision.decision for decision in history.rounds if decision.search == name]
    fits = last is None or last.fits
    result = "holds" if fits else "found nothing within the memory limit and keeps"
    held, load = history.incumbent_results, history.workload
    if last:
        held = history.measured[last.held]
        load = load.model_copy(update={"link": last.link, "world_size": last.world_size})
    step = held.step(load)
    gain = f", step {_interval(step)} times the start's in {step.source}" if step else ""
    files = f" Its training runs are in {held.folder}." if held.folder else ""
    return (
        f"After {plural(len(decisions), 'round')}, {decisions.count('accept')} of which changed "
        f"the incumbent, the strategy search{name and f' {name}'} {result}: "
        f"{held.strategy.label()} ({held.source}){gain}.{files}"
    )


def _question(last: Decision | History, name: str) -> str:
    setting = last if isinstance(last, Decision) else last.workload
    return (
        f"Which strategy has the shortest step on {plural(setting.world_size, 'rank')} with "
        f"link {setting.link}? The search{name and f' {name}'} predicts what it may try, races a "
        "few and holds the fastest whose perplexity is tolerated."
    )


def _round(decision: Decision) -> Section:
    number, verdict = decision.round, decision.verdict
    sentences = [_narrowed(decision, decision.space)] if decision.space else []
    sentences.append(f"Judge {verdict.judge}: {verdict.reason}.")
    for candidate in decision.candidates:
        if candidate.id == verdict.choice and candidate.action is not None:
            action = candidate.action
            sentences.append(
                f"Action: {action.name} ({action.change}). Hypothesis: {action.hypothesis}. Fact: "
                f"{action.fact}."
            )
    if verdict.prompts:
        prompts = ", ".join(verdict.prompts)
        sentences.append(f"Prompts to a language model, with the answers: {prompts}.")
    if decision.compared:
        stopped = decision.stopped
        sentences.append(f"The trial took {decision.seconds:.0f} s; the race ended: {stopped}.")
    sentences += [f"Decision: {decision.decision}. {decision.reason}.", *decision.warnings]
    return Section(
        f"Round {number}{f' of {decision.search}' if decision.search else ''}: {decision.decision}",
        sentences=sentences,
        tables=[_race(decision)],
        folded=True,
    )


def _narrowed(decision: Decision, space: Narrowing) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in space.unpredicted.items())
    what = f"{space.strategies:,} legal strategies"
    if any(candidate.action for candidate in decision.candidates):
        what = f"{plural(space.strategies, 'action')} for which a fact speaks"
    # an action hides no other one
    spared = f"{space.spared:,} that save memory which is not needed, " if space.spared else ""
    return (
        f"{what}: {space.beyond_memory:,} beyond the memory limit, {spared}{space.predicted:,} "
        f"predicted{f', not predicted: {reasons}' if reasons else ''}; of these {space.known:,} "
        f"were known already.{f' Not proposed: {space.too_short}.' if space.too_short else ''}"
    )


def _race(decision: Decision) -> Table:
    headings = [
        "strategy",
        "raced as",
        "predicted step, ms",
        "step over the incumbent's",
        "repetitions",
        "perplexity from the start's",
        "result",
    ]
    rows = map(_arm, decision.compared)
    return make_table(f"Race of round {decision.round}", headings, rows, layout="text")


def _arm(arm: Comparison) -> list[str]:
    ratio = arm.perplexity_ratio
    return [
        arm.label,
        ", ".join(_ROLES[role] for role in arm.roles),
        figure(arm.predicted_ms),
        _interval(arm.step) if arm.step else ABSENT,
        str(arm.step.repetitions) if arm.step else ABSENT,
        percent(None if ratio is None else ratio - 1),
        "; ".join(arm.objections) or "faster, and as good",
    ]


def _interval(step: StepRatio) -> str:
    return f"{fixed(step.ratio, 3)} ({step.interval})"
