"""Judges that fail probes or give no answer are replaced by rules."""

import pytest

from shardlab.config.search import Agent
from shardlab.core.errors import UserError
from shardlab.search.judge import Judge, Question, RuleJudge
from shardlab.search.judges import judge_of
from shardlab.search.supervision import SupervisedJudge
from tests.record_factory import make_candidate


class First(Judge):
    name = "first"

    def choose(self, question):
        return self._verdict(question.candidates[0].id, "it comes first")


class Unreadable(RuleJudge):
    """Answers with garbage where it should abstain."""

    name = "unreadable"

    def choose(self, question):
        verdict = super().choose(question)
        return verdict if verdict.choice else self._verdict(None, "I do not know", "answer")


class Dead(Judge):
    name = "dead"

    def choose(self, question):
        raise UserError("no server at 127.0.0.1:1")


class Spy(RuleJudge):
    name = "spy"


def ask() -> Question:
    held, other = make_candidate(engine="fsdp2"), make_candidate(engine="ddp")
    return Question("facts", held, [other])


def test_rules_pass_the_probes_so_they_can_be_passed():
    assert SupervisedJudge(Spy()).choose(ask()).judge == "spy"


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        (First(), "first failed 4 of 5 probes"),
        (Unreadable(), "unreadable failed 1 of 5 probes"),
        (Dead(), "dead gave no answer (no server at"),
    ],
)
def test_rules_take_the_place_of_a_judge_that_fails(judge, why):
    verdict = SupervisedJudge(judge).choose(ask())
    assert verdict.judge == "rules"
    assert verdict.reason.startswith(why)
    assert verdict.choice == RuleJudge().choose(ask()).choice


def test_rules_take_the_place_of_answers_that_are_not_there():
    judge = judge_of(Agent(judge="replay", model="absent"))
    verdict = judge.choose(ask())
    assert verdict.judge == "rules" and verdict.reason.startswith("replay gave no answer (absent")
    assert judge.conversation().exchanges == []
