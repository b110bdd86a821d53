"""Replays on tables: laws of regret, known answers, and policies against each other."""

import math
from contextlib import nullcontext

import numpy as np
import pytest

from shardlab.core.errors import UserError
from shardlab.search.changes import changes
from shardlab.search.evidence import predicted
from shardlab.search.judge import Judge, Question, RuleJudge
from shardlab.search.policies.controls import (
    ConstantJudge,
    Patient,
    ShuffledEvidence,
    WithoutEvidence,
)
from shardlab.search.policies.documents import Replay
from shardlab.search.policies.judged import JudgedPolicy, forecast_policy
from shardlab.search.policies.policy import Choice, GreedyPolicy, ListPolicy, Policy, RandomPolicy
from shardlab.search.policies.replay import Table, replay
from shardlab.search.policies.summary import summarize
from tests.search.chat_server import judge as http_judge
from tests.search.chat_server import listed, says, serving
from tests.search.racing import RacingMachine
from tests.search.tables import made_search, made_table


@pytest.fixture(scope="module")
def machine() -> RacingMachine:
    return RacingMachine(2, "100mbit", seed=3, noise=0.1)


@pytest.fixture(scope="module")
def table(machine: RacingMachine) -> Table:
    return made_table(machine, 24)


def exact(machine: RacingMachine, table: Table) -> Table:
    """The table without noise."""
    runs = {
        key: run.model_copy(update={"step_ms": [machine.seconds(table.strategies[key])] * 4})
        for key, run in table.runs.items()
    }
    alone = table.alone.model_copy(update={"step_ms": [1.0] * 4})
    return table._replace(runs=runs, alone=alone)


def judged(machine: RacingMachine, table: Table, judge: Judge) -> JudgedPolicy:
    search = made_search(machine)
    return JudgedPolicy("judged", judge, lambda known: search.proposer(table, known))


@pytest.mark.parametrize("make", [RandomPolicy, GreedyPolicy])
def test_without_noise_regret_falls_to_nothing(machine, table, make):
    whole = exact(machine, table)
    found = replay(make(5), whole, 5, len(table.runs) + 3)
    assert {*found.picks} == {*table.runs} - {table.start}
    assert found.regret == sorted(found.regret, reverse=True)
    true = {key: machine.seconds(each) for key, each in table.strategies.items()}
    assert found.regret[0] == pytest.approx(true[table.start] / min(true.values()) - 1)
    assert found.regret[-1] == 0
    assert found == replay(make(5), whole, 5, len(table.runs) + 3)


def test_what_a_policy_measures_does_not_say_what_it_is_worth(machine, table):
    """All strategies take as long: a policy that measures more has no more and no less regret."""
    steps = np.random.default_rng(1)
    found = []
    for seed in range(30):
        runs = {
            key: run.model_copy(update={"step_ms": [*np.exp(steps.normal(0, 0.3, 24))]})
            for key, run in table.runs.items()
        }
        found.append(replay(RandomPolicy(seed), table._replace(runs=runs), seed, 8).regret)
    error = np.std(found, axis=0) / math.sqrt(len(found))
    assert (abs(np.mean(found, axis=0)) < 4 * error + 1e-9).all()


def test_halves_share_no_repetition_and_drift_moves_no_figure(table):
    measured, held_out = table.halves(1)
    assert sorted(measured + held_out) == [*range(24)]
    assert table.halves(2) != (measured, held_out) == table.halves(1)
    drift = np.exp(np.random.default_rng(0).normal(0, 2, 24))
    slow = {
        key: run.model_copy(update={"step_ms": [*(np.array(run.step_ms) * drift)]})
        for key, run in table.runs.items()
    }
    other = table._replace(runs=slow).logs(measured)
    assert other == pytest.approx(table.logs(measured))


def test_a_list_is_followed_to_its_end(table):
    some = [*table.runs][1:4]
    found = replay(ListPolicy("some", ["unknown", *some]), table, 0, 8)
    assert (found.picks, found.abstained) == (some, True)
    assert len(found.regret) == 9
    assert len({*found.regret[3:]}) == 1


def test_greedy_changes_as_little_as_it_can(table):
    measured, _ = table.halves(0)
    known = table.known([table.start], measured, table.logs(measured))
    choice = GreedyPolicy(0).choose(known).strategy
    counts = [len(changes(table.strategies[table.start], table.strategies[k])) for k in known.new]
    chosen = len(changes(table.strategies[table.start], table.strategies[choice]))
    assert chosen == min(counts) < max(counts)


def test_the_forecast_sees_no_step_of_the_table(machine, table):
    shuffled = [*table.runs.values()]
    runs = {
        key: run.model_copy(update={"step_ms": other.step_ms})
        for (key, run), other in zip(table.runs.items(), shuffled[::-1], strict=True)
    }
    search, other = made_search(machine), table._replace(runs=runs)
    policies = [forecast_policy(search, each) for each in (table, other)]
    first, second = (replay(each, table, 0, 5).picks for each in policies)
    assert first == second


@pytest.mark.long
def test_rules_are_near_the_best_within_8_measurements(machine, table):
    found = replay(judged(machine, table, RuleJudge()), exact(machine, table), 0, 8)
    assert found.regret[-1] <= 0.05
    assert len({*found.picks, table.start}) == len(found.picks) + 1
    assert (found.infeasible, found.flips) == (0, 0)


@pytest.mark.long
def test_rules_beat_random_on_worlds_that_nothing_was_tuned_on():
    found = []
    for seed, (ranks, rate) in enumerate([(2, None), (2, "100mbit"), (4, "1gbit")], 50):
        machine = RacingMachine(ranks, rate, seed=seed, noise=0.1)
        world = made_table(machine)._replace(name=str(seed))
        for n in range(2):
            found.append(replay(RandomPolicy(n), world, n, 8))
            rules = replay(judged(machine, world, RuleJudge()), world, n, 8)
            found.append(rules.model_copy(update={"policy": "rules"}))
    rules, others = sorted(summarize(found, "rules"), key=lambda each: each.policy != "rules")
    assert rules.regret[8].mean <= 0.05
    assert all(each.mean > 0 for each in others.ahead[1:])


def test_faults_of_a_language_model_are_counted(machine, table):
    def first(request, number):
        return 200, says(listed(request)[0])

    with serving(first) as server:
        found = replay(judged(machine, table, http_judge(server)), table, 0, 3)
    assert (found.flips, found.infeasible, found.abstained) == (1, 0, True)
    with serving(lambda request, number: (200, says("00000000"))) as server:
        found = replay(judged(machine, table, http_judge(server)), table, 0, 3)
    assert (found.flips, found.infeasible, found.abstained) == (0, 1, True)


def test_an_answer_that_fails_ends_one_replay(machine, table):
    with serving(lambda request, number: (403, {})) as server:
        found = replay(judged(machine, table, http_judge(server)), table, 0, 3)
    assert (found.picks, found.infeasible, found.abstained) == ([], 1, True)


def test_a_judge_that_is_silent_three_times_in_a_row_is_not_asked_again():
    class Silent(Judge):
        name, asked = "silent", 0

        def choose(self, question):
            self.asked += 1
            if self.asked != 3:
                raise UserError("no answer within 120 s")
            return self._verdict(None, "awake for once")

    silent, question = Silent(), Question("", None, [])
    patient = Patient(silent)
    for number in range(1, 9):
        with nullcontext() if number == 3 else pytest.raises(UserError):
            patient.choose(question)
    assert silent.asked == 6
    with pytest.raises(UserError, match="silent is not asked again: no answer 3 times in a row"):
        patient.choose(question)


class Asked(Judge):
    """Judge that keeps the questions."""

    name = "asked"

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def choose(self, question):
        self.questions.append(question)
        return self._verdict(None, "asked")


def test_controls_change_what_is_told_and_not_what_is_offered(machine, table):
    measured, _ = table.halves(0)
    known = table.known([*table.runs][:6], measured, table.logs(measured))
    plain = Asked()
    proposer = made_search(machine).proposer(table, known)
    proposer.propose(1, plain)
    (question,) = plain.questions
    shuffled, bare = Asked(), Asked()
    for judge in (ShuffledEvidence(shuffled, 1), WithoutEvidence(bare), ConstantJudge()):
        judge.choose(question)
    (one,), (other,) = shuffled.questions, bare.questions

    def words(of: Question) -> dict[str, str]:
        return {each.id: predicted(each.prediction) for each in of.candidates}

    assert words(one) != words(question)
    assert sorted(words(one).values()) == sorted(words(question).values())
    assert one.evidence != question.evidence
    assert sorted(one.evidence) == sorted(question.evidence)
    assert len({*words(other).values()}) == 1 and not other.evidence
    assert words(one).keys() == words(question).keys() == words(other).keys()
    ids = [each.id for each in question.candidates]
    assert ConstantJudge().choose(question).choice == min(ids)


def test_differences_are_paired(table):
    """Two policies of the same luck: their difference is known, their regrets are not."""
    luck = np.random.default_rng(0).exponential(1, (4, 5))
    found = [
        Replay(
            policy=name,
            workload=str(load),
            seed=seed,
            picks=["a"],
            regret=[1.0, luck[load, seed] + more],
            first=name == "good",
            abstained=False,
            infeasible=2,
            flips=0,
        )
        for name, more in (("good", 0.0), ("bad", 0.1))
        for load in range(4)
        for seed in range(5)
    ]
    good, bad = summarize(found, "good")
    assert good.regret[1].low < luck.mean() < good.regret[1].high
    assert good.regret[1].mean == pytest.approx(luck.mean())
    assert [bad.ahead[1].low, bad.ahead[1].mean, bad.ahead[1].high] == pytest.approx([0.1] * 3)
    assert (good.first, bad.first, bad.infeasible, bad.measured) == (1, 0, 2, 1)
    assert bad.by_workload["2"] == pytest.approx(luck[2].mean() + 0.1)


def test_a_table_needs_its_start_and_two_halves(table):
    timed = [*table.runs.values(), table.alone]
    other = next(each.engine for each in table.strategies.values() if each.engine != "fsdp2")
    some = Table.of(timed, table.start, lambda strategy: strategy.engine == other)
    assert {each.engine for each in some.strategies.values()} == {other, "fsdp2"}
    assert [key for key in some.runs if some.strategies[key].engine == "fsdp2"] == [table.start]
    with pytest.raises(UserError, match=r"lacks the strategy of agent\.start"):
        Table.of(timed, "0" * 16, lambda strategy: True)
    short = [run.model_copy(update={"step_ms": [1.0]}) for run in timed]
    with pytest.raises(UserError, match="at least 4"):
        Table.of(short, table.start, lambda strategy: True)


class Twice(Policy):
    name = "twice"

    def choose(self, known):
        return Choice(next(iter(known.ratios)))


def test_nothing_is_measured_twice(table):
    with pytest.raises(AssertionError, match="twice"):
        replay(Twice(), table, 0, 2)
