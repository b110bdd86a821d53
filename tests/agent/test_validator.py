import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.agent.proposals.candidates import Draft
from shardlab.agent.proposals.evidence import estimate_peak
from shardlab.agent.proposals.proposal import admit, memory_limit, reason_to_stop
from shardlab.agent.proposals.seeds import random_strategies
from shardlab.environment.host import memory_bytes
from shardlab.experiment.schema import Agent
from tests.agent.searches import AGENT, LIMIT, begin, past_round, proposal_of

ILLEGAL = [
    {"engine": "ddp", "wrap": "root"},
    {"engine": "fsdp2", "bucket_mb": 5.0},
    {"wrap": "root", "reshard_after_forward": True},
    {"gradients": {"codec": "none", "error_feedback": True}},
    {"gradients": {"codec": "int8", "route": "native"}},
    {"gradients": {"codec": "int9"}},
    {"colour": "red"},
]


def drafts(*documents):
    return [Draft(document=each, why="by test") for each in documents]


@pytest.mark.parametrize("document", ILLEGAL)
def test_invalid_combination_is_refused_with_its_reason(document):
    admitted, refused = admit(drafts(document), begin(), LIMIT, 6)
    assert admitted == []
    assert refused[0].reason.startswith("strategy")


def test_measured_strategy_is_refused_in_any_spelling():
    spelled = {"engine": "fsdp2", "wrap": "block", "gradients": {"codec": "int8"}}
    admitted, refused = admit(drafts(spelled), begin(), LIMIT, 6)
    assert admitted == []
    assert refused[0].reason == "already measured: run fsdp2-int8"


def test_strategy_over_the_memory_limit_is_refused_with_the_estimate():
    history = begin()
    peak = history.incumbent.measurements[0].memory_peak_bytes
    document = {"wrap": "root"}
    admitted, refused = admit(drafts(document), history, peak, 6)
    assert admitted == []
    assert "the limit is 812 MB" in refused[0].reason
    assert admit(drafts(document), history, 2 * peak, 6)[0] != []


def test_candidates_are_limited_and_sorted_by_id():
    documents = [each.model_dump(mode="json") for each in random_strategies(3, 40)]
    admitted, _ = admit(drafts(*documents), begin(), LIMIT, 6)
    ids = [each.id for each in admitted]
    assert len(ids) == 6
    assert ids == sorted(set(ids))


@given(st.permutations([{"wrap": "root"}, {"reshard_after_forward": False}, {"engine": "ddp"}]))
def test_candidates_do_not_depend_on_the_order_of_drafts(documents):
    admitted, _ = admit(drafts(*documents), begin(["fsdp2"]), LIMIT, 6)
    assert [each.id for each in admitted] == sorted(each.id for each in admitted)
    assert {each.label for each in admitted} == {
        "fsdp2, none, one unit",
        "fsdp2, none, kept after forward",
        "ddp, none",
    }


def test_estimate_of_the_incumbent_is_its_measured_peak():
    history = begin()
    incumbent = history.incumbent
    worst = max(each.memory_peak_bytes for each in incumbent.measurements)
    assert estimate_peak(incumbent.strategy, incumbent, history.workload) == worst


def test_memory_limit_is_given_or_the_machines_share():
    assert memory_limit(Agent(memory_limit_gb=1.5), 2) == 1_500_000_000
    assert memory_limit(Agent(), 4) == memory_bytes() // 4


@pytest.mark.parametrize(
    ("decisions", "agent", "reason"),
    [
        (["accept", "none", "reject"], Agent(budget=3), None),
        (["accept", "none", "reject"], Agent(budget=2), "the budget of 2 trials is spent"),
        (["accept"] * 3, Agent(budget=2), "the budget of 2 trials is spent"),
        (["reject", "none", "reject"], Agent(stop_loss=2), "stop-loss: the last 2 trials were"),
        (["reject", "accept", "reject"], Agent(stop_loss=2), None),
    ],
)
def test_search_stops_by_budget_and_stop_loss(decisions, agent, reason):
    rounds = [
        past_round(number, decision, "none" if decision == "none" else "ok")
        for number, decision in enumerate(decisions, 1)
    ]
    found = reason_to_stop(begin().model_copy(update={"rounds": rounds}), agent)
    assert found is None if reason is None else found.startswith(reason)


def test_no_candidates_after_the_search_has_stopped():
    rounds = [past_round(number, "accept") for number in range(1, 9)]
    proposal = proposal_of(begin().model_copy(update={"rounds": rounds}), agent=AGENT)
    assert (proposal.candidates, proposal.chosen, proposal.verdict.choice) == ([], None, None)
    assert "budget" in proposal.verdict.reason
