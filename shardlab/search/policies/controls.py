"""Judges around a judge for many replays: one that reads nothing, evidence that says nothing, and
patience that ends."""

import random
import re

from shardlab.core.errors import UserError
from shardlab.search.conversation import Conversation
from shardlab.search.judge import Judge, Question
from shardlab.search.rounds import Candidate, Prediction, Verdict

_PATIENCE = 3
_FACTS = re.compile(r"^(Strategy .*?\]: )(.*)$", re.MULTILINE)


class ConstantJudge(Judge):
    """Judge that chooses the first candidate of their order by id, and reads nothing."""

    name = "constant"

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        return self._verdict(min(each.id for each in question.candidates), "the first")


class ShuffledEvidence(Judge):
    """Judge that is told predictions and measurements of the wrong strategies.

    Args:
        judge: that chooses.
        seed: of the permutations.
    """

    def __init__(self, judge: Judge, seed: int) -> None:
        self.name = f"{judge.name}, shuffled evidence"
        self._judge, self._seed = judge, seed

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        # equal questions are shuffled alike, whatever the order of their candidates
        chance = random.Random(self._seed)
        candidates = sorted(question.candidates, key=lambda each: each.id)
        predictions = [each.prediction for each in candidates]
        facts = [match[2] for match in _FACTS.finditer(question.evidence)]
        chance.shuffle(predictions)
        chance.shuffle(facts)
        evidence = _FACTS.sub(lambda match: match[1] + facts.pop(), question.evidence)
        pairs = zip(candidates, predictions, strict=True)
        told = [each.model_copy(update={"prediction": other}) for each, other in pairs]
        return self._judge.choose(Question(evidence, question.incumbent, told))


class WithoutEvidence(Judge):
    """Judge that is told the strategies alone: neither measurements nor predictions."""

    def __init__(self, judge: Judge) -> None:
        self.name, self._judge = f"{judge.name}, no evidence", judge

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        bare = Question("", _bare(question.incumbent), [_bare(e) for e in question.candidates])
        return self._judge.choose(bare)


class Patient(Judge):
    """Judge that is asked no more once it gave no answer three times in a row: a server that hangs
    would take minutes for each of hundreds of questions."""

    def __init__(self, judge: Judge) -> None:
        self.name, self._judge, self._silent = judge.name, judge, 0

    def choose(self, question: Question) -> Verdict:  # noqa: D102
        if self._silent >= _PATIENCE:
            raise UserError(f"{self.name} is not asked again: no answer {_PATIENCE} times in a row")
        self._silent += 1
        verdict = self._judge.choose(question)
        self._silent = 0
        return verdict

    def conversation(self) -> Conversation:  # noqa: D102
        return self._judge.conversation()


def _bare(each: Candidate) -> Candidate:
    nothing = Prediction(
        step_ms=None,
        low_ms=None,
        high_ms=None,
        memory_bytes=0,
        perplexity_ratio=None,
        note="withheld",
    )
    return each.model_copy(update={"prediction": nothing})
