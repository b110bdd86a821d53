import re

from shardlab.agent.decisions.decision import conclude
from shardlab.agent.proposals.evidence import describe
from shardlab.agent.records.rounds import Trial
from tests.agent.searches import AGENT, LIMIT, begin, proposal_of


def lines_of_strategies(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("Strategy ")]


def test_every_strategy_gets_the_same_template():
    lines = lines_of_strategies(describe(begin(), AGENT, LIMIT))
    assert len(lines) == 8
    shapes = {re.sub(r"\d+(\.\d+)?", "N", line.partition("]: ")[2]) for line in lines}
    assert len(shapes) == 1


def test_figures_are_means_over_seeds():
    history = begin(["fsdp2"])
    steps = [each.step_ms_p50 for each in history.incumbent.measurements]
    assert f"step {sum(steps) / 3:.2f} ms +- " in describe(history, AGENT, LIMIT)


def test_strategies_are_listed_by_hash():
    history = begin()
    lines = lines_of_strategies(describe(history, AGENT, LIMIT))
    by_hash = [history.measured[key].strategy.label() for key in sorted(history.measured)]
    assert [line.split(" [")[0].removeprefix("Strategy ") for line in lines] == by_hash


def test_failed_trial_is_listed_and_counts_against_the_budget():
    history = begin()
    proposal = proposal_of(history)
    failed = Trial(outcome="timeout", detail="after 300 s", hash=proposal.chosen_hash)
    text = describe(conclude(history, proposal, failed, 0.03), AGENT, LIMIT)
    assert "[round 1]: no figures, the trial ended with outcome timeout." in text
    assert f"Round 1: tried {proposal.chosen.label()}; decision reject." in text
    assert f"Trials left: {AGENT.budget - 1} of {AGENT.budget}." in text


def test_bytes_are_listed_by_kind_of_message():
    text = describe(begin(["fsdp2"]), AGENT, LIMIT)
    assert "gradients 2.600 MB asked, 2.600 MB moved; weights 5.200 MB asked, 5.200 MB" in text
