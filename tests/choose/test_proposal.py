"""Limits and stops of a search, and how predictions become a shortlist."""

from collections.abc import Sequence

import pytest

from shardlab.choose.decision import conclude
from shardlab.choose.history import initial_history, reason_to_stop
from shardlab.choose.judge import choose_by_rules
from shardlab.choose.proposal import make_shortlist, propose
from shardlab.choose.records import Decision, Narrowing, Verdict
from shardlab.choose.settings import Agent
from shardlab.choose.space import Feasible
from shardlab.predict.model import Estimate
from shardlab.predict.settings import Space
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.sync import Sync
from shardlab.train.settings import Train
from tests.choose.machine import ENDLESS, SETTINGS, Machine
from tests.choose.searches import AGENT, DDP, KEPT, begin, proposal_of, trial_of
from tests.record_factory import STRATEGIES, make_records, trial_run

HISTORY = begin(timed=[])


def ranked(*documents: dict[str, object] | str) -> list[Feasible]:
    """Strategies in the order of their predictions; the last one has none."""
    options = []
    for number, document in enumerate(documents, 1):
        form = STRATEGIES[document] if isinstance(document, str) else document
        strategy = parse_strategy(form).canonical()
        step = "unknown" if number == len(documents) else Estimate(number / 100, 0, 1)
        options.append(Feasible(strategy, strategy.hash(), 1, step))
    return options


def labels(options: Sequence[Feasible]) -> list[str]:
    return [option.strategy.label() for option in options]


def test_a_shortlist_holds_the_best_of_each_class_and_one_to_explore():
    predicted = ranked(
        {"engine": "ddp", "gradients": {"codec": "int8:group=64"}},
        {"engine": "ddp", "bucket_mb": 5.0},
        {"engine": "ddp", "bucket_mb": 1.0},
        {
            "engine": "fsdp2",
            "gradients": {"codec": "int8:group=128"},
            "reshard_after_forward": False,
        },
        {"engine": "manual", "gradients": STRATEGIES["fsdp2-topk"]["gradients"]},
        {"engine": "manual"},
        {"engine": "fsdp1"},
    )
    shortlist = make_shortlist(predicted, HISTORY, 0.03, 4)
    assert labels(shortlist.options) == [
        "ddp, none, bucket_mb=5.0",
        "fsdp2, int8:group=128, reshard_after_forward=false",
        "manual, none, route=exchange",
        "ddp, int8:group=64",
    ]
    assert shortlist.excluded == 1
    fewer = make_shortlist(predicted, HISTORY, 0.03, 2)
    assert fewer.options == [shortlist.options[0], shortlist.options[-1]]
    assert labels(make_shortlist(predicted[1:], HISTORY, 0.03, 4).options)[-1] == "fsdp1, none"


def test_sync_does_not_take_the_place_of_a_codec_to_explore():
    predicted = ranked(
        {"engine": "ddp", "sync": {"every": 8}},
        {"engine": "ddp", "sync": {"every": 4}},
        {"engine": "ddp", "gradients": {"codec": "int8:group=64"}},
        {"engine": "ddp", "bucket_mb": 5.0},
        {"engine": "fsdp1"},
    )
    shortlist = make_shortlist(predicted, HISTORY, 0.03, 4)
    assert shortlist.options == [predicted[3], predicted[0], predicted[2]]
    assert make_shortlist(predicted, HISTORY, 0.03, 2).options == [predicted[3], predicted[0]]


@pytest.mark.parametrize(
    ("step", "listed"),
    [(0.0105, 1), (0.0112, 2)],
)
def test_predictions_that_tie_are_listed_once(step, listed):
    weights = {"codec": "int8:group=128"}
    plain, coded = ranked({}, {"weights": weights}, "ddp")[:2]
    history = HISTORY.with_results(trial_run(coded.strategy, seed) for seed in range(2))
    pair = [plain, coded._replace(step=Estimate(step, 0, 1))]
    shortlist = make_shortlist(pair, history, 0.03, 6)
    assert (shortlist.options, shortlist.tolerated) == (pair[:listed], pair)


def test_what_was_raced_or_failed_is_not_listed_again():
    proposal = proposal_of(HISTORY, DDP, KEPT)
    trial = trial_of(proposal, **{f"_{KEPT.hash()}": "crash"})
    history = conclude(HISTORY, proposal, trial, AGENT)
    predicted = ranked("ddp", {"reshard_after_forward": False}, "fsdp2", "fsdp2-exchange", "ddp")
    assert labels(make_shortlist(predicted, HISTORY, 0.03, 6).options)[:2] == [
        "ddp, none",
        KEPT.label(),
    ]
    after = make_shortlist(predicted, history, 0.03, 6)
    assert (labels(after.options), after.excluded) == (["fsdp2, none, route=exchange"], 4)


@pytest.mark.parametrize(
    ("decisions", "agent", "reason"),
    [
        (["accept", "none", "reject"], Agent(budget=3), None),
        (["accept", "none", "reject"], Agent(budget=2), "the budget of 2 trials is spent"),
        ([], Agent(budget=0), "the budget of 0 trials is spent"),
        (["reject", "none", "reject"], Agent(stop_loss=2), "stop-loss: the last 2 trials were"),
        (["reject", "accept", "reject"], Agent(stop_loss=2), None),
        (["accept"] * 3, Agent(budget_minutes=3.0), "the budget of 3 minutes is spent: 3.0"),
        (["accept"] * 2, Agent(budget_minutes=3.0), None),
    ],
)
def test_a_search_stops_by_trials_minutes_and_rejections(decisions, agent, reason):
    rounds = [
        Decision(
            round=number,
            search="",
            link="loopback",
            world_size=2,
            verdict=Verdict(choice=None, reason="by test", judge="rules"),
            space=None,
            candidates=[],
            stopped="",
            seconds=60.0,
            decision=decision,
            reason="by test",
            held=HISTORY.start,
        )
        for number, decision in enumerate(decisions, 1)
    ]
    stop = reason_to_stop(HISTORY.model_copy(update={"rounds": rounds}), agent)
    assert stop is None if reason is None else stop.startswith(reason)


@pytest.mark.parametrize(
    ("ranks", "steps", "count"), [(2, 960, 2), (2, 959, 1), (2, 239, 0), (4, 960, 0)]
)
def test_synchronisations_that_training_is_too_short_for_are_not_proposed(ranks, steps, count):
    def narrowed(steps: int, sync: tuple[Sync, ...]) -> Narrowing:
        machine = Machine(rate="100mbit")
        agent = machine.agent(world_size=ranks)
        records = [run.model_copy(update={"steps": steps}) for run in make_records(seeds=1)]
        history = initial_history(records, [], agent, Train())
        space = Space(gradients=(), weights=(), sync=sync)
        arguments = space, machine.shapes, machine.predict, choose_by_rules, (), SETTINGS
        return propose(1, history, agent, ENDLESS, *arguments).space

    syncs = Space().sync
    narrowing = narrowed(steps, syncs)
    assert narrowing.strategies == narrowed(1000, syncs[:count]).strategies
    assert count == 0 or narrowing.strategies > narrowed(steps, ()).strategies
    assert [f"every={sync.every}" in narrowing.too_short for sync in syncs] == [
        number >= count for number in range(2)
    ]
