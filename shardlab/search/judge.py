"""The contract of a judge, and the deterministic judge that needs no server."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardlab.search.conversation import Conversation
from shardlab.search.rounds import Candidate, Fault, Prediction, Verdict


@dataclass(frozen=True)
class Question:
    """Question to a judge: which of the candidates should be raced next?"""

    evidence: str
    """the facts, in words"""
    incumbent: Candidate
    """that is held, and not to be chosen"""
    candidates: list[Candidate]


class Judge(ABC):
    """Chooses among the candidates of a question, or abstains, and says why.

    A judge never invents a strategy: the choice of its verdict is the id of one of the candidates
    or None. It answers equal questions equally, whatever the order of the candidates.
    """

    name: str
    prompts: int = 0
    """sent to a language model so far"""

    @abstractmethod
    def choose(self, question: Question) -> Verdict:
        """Return the verdict.

        Raises:
            UserError: the judge cannot be asked (only language models).
        """

    def conversation(self) -> Conversation:
        """Return the prompts that were sent so far, with their answers."""
        return Conversation(judge=self.name)

    def _verdict(self, choice: str | None, reason: str, fault: Fault | None = None) -> Verdict:
        return Verdict(
            choice=choice, reason=reason, judge=self.name, prompts=self.prompts, fault=fault
        )


class RuleJudge(Judge):
    """Judge that follows one rule, from predictions alone.

    Of the candidates of the first of these kinds that there are any of, the one with the lowest
    upper end of its predicted step:

    1. the quality is known, and a shorter step than the incumbent's is expected;
    2. the quality is unknown, and a shorter step is expected, or none can be predicted;
    3. the quality is known, and the interval reaches below the incumbent's step.

    It abstains when there is none.
    """

    name = "rules"

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        held = question.incumbent.prediction.step_ms
        limit = math.inf if held is None else held
        kinds = [
            [each for each in question.candidates if rule(each.prediction, limit)]
            for rule in (_expected, _unknown, _possible)
        ]
        found = next(filter(None, kinds), [])
        if not found:
            return self._verdict(None, "abstains: no candidate is predicted to be faster")
        best = min(found, key=lambda each: (_high(each.prediction), each.id))
        step, high = best.prediction.step_ms, best.prediction.high_ms
        if step is None or best.prediction.perplexity_ratio is None:
            return self._verdict(best.id, f"{best.label}: {best.prediction.note}")
        than = "" if held is None else f", and {held:.1f} ms for the incumbent"
        return self._verdict(
            best.id,
            f"{best.label}: the lowest upper end of a predicted step, {high:.1f} ms "
            f"({step:.1f} ms expected{than})",
        )


def _expected(each: Prediction, held_ms: float) -> bool:
    known = each.perplexity_ratio is not None
    return known and each.step_ms is not None and each.step_ms < held_ms


def _unknown(each: Prediction, held_ms: float) -> bool:
    return each.step_ms is None or (each.perplexity_ratio is None and each.step_ms < held_ms)


def _possible(each: Prediction, held_ms: float) -> bool:
    known = each.perplexity_ratio is not None
    return known and each.low_ms is not None and each.low_ms < held_ms


def _high(each: Prediction) -> float:
    return math.inf if each.high_ms is None else each.high_ms
