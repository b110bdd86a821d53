"""Supervision of a judge: probes with known answers, and rules in place of one that fails.

A search has to go on whatever a server does, and a model that cannot read a list of predictions
should not choose from one.
"""

from typing import Any

from shardlab.config.strategy import parse_strategy
from shardlab.core.errors import UserError
from shardlab.search.conversation import Conversation
from shardlab.search.judge import Judge, Question, RuleJudge
from shardlab.search.rounds import Candidate, Prediction, Verdict

_HELD_MS = 100.0
_STEPS_MS = (
    (60.0, 90.0, 95.0),
    (93.0, 58.0, 97.0),
    (96.0, 91.0, 55.0),
    (70.0, 45.0, 88.0),
    (130.0, 170.0, 150.0),
)
"""predicted steps of the candidates of each probe; in the last one none is faster"""
_STRATEGIES: tuple[dict[str, Any], ...] = (
    {"engine": "ddp"},
    {"engine": "fsdp2", "gradients": {"codec": "int8:group=128"}},
    {"engine": "manual"},
)


class SupervisedJudge(Judge):
    """Judge whose verdicts count only if it answers all probes; else the rules judge.

    The reason of the verdict says what failed.

    Args:
        judge: the one to supervise.
    """

    def __init__(self, judge: Judge) -> None:
        self.name = judge.name
        self._judge = judge

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        try:
            failed = sum(not passes(self._judge, steps) for steps in _STEPS_MS)
            if not failed:
                return self._judge.choose(question)
            why = f"{self.name} failed {failed} of {len(_STEPS_MS)} probes"
        except UserError as error:
            why = f"{self.name} gave no answer ({error})"
        verdict = RuleJudge().choose(question)
        update = {"reason": f"{why}; {verdict.reason}", "prompts": self._judge.prompts}
        return verdict.model_copy(update=update)

    def conversation(self) -> Conversation:  # noqa: D102
        return self._judge.conversation()


def passes(judge: Judge, steps_ms: tuple[float, ...]) -> bool:
    """Return whether a judge finds the shortest of these steps, or abstains where none is short.

    Raises:
        UserError: the judge cannot be asked.
    """
    candidates = [
        _candidate(document, step) for document, step in zip(_STRATEGIES, steps_ms, strict=True)
    ]
    best = min(candidates, key=lambda each: each.prediction.step_ms or 0.0)
    expected = best.id if min(steps_ms) < _HELD_MS else None
    evidence = (
        "Workload: 1000000 parameters on 2 ranks. "
        f"Incumbent: fsdp2, none, step {_HELD_MS:.2f} ms. "
        "Limits: validation perplexity at most 1.030 times the start's."
    )
    held = _candidate({"engine": "fsdp2"}, _HELD_MS)
    verdict = judge.choose(Question(evidence, held, candidates))
    # an order flip or an unreadable answer is no abstention
    return verdict.choice == expected and verdict.fault is None


def _candidate(document: dict[str, Any], step_ms: float) -> Candidate:
    strategy = parse_strategy(document)
    return Candidate(
        id=strategy.hash()[:8],
        strategy=strategy.canonical(),
        label=strategy.label(),
        why="probe",
        prediction=Prediction(
            step_ms=step_ms,
            low_ms=0.97 * step_ms,
            high_ms=1.03 * step_ms,
            memory_bytes=400_000_000,
            perplexity_ratio=1.0,
            note="measured",
        ),
    )
