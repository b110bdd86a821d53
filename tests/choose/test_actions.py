"""Actions: each has its evidence, changes one setting, and is offered for no other reason."""

from statistics import fmean
from typing import Any

import pytest

from shardlab.choose.actions import RULES, Choices, actions
from shardlab.choose.facts import Measurements, exposed, gathers_exposed, moved_twice
from shardlab.choose.incumbent import with_best_incumbent
from shardlab.choose.judge import choose_by_rules
from shardlab.predict.settings import Space
from shardlab.strategy.document import differences, parse_strategy
from tests.choose.machine import Machine
from tests.record_factory import in_round, make_breakdown
from tests.timed_run_factory import make_timed

QUIET = Measurements(
    source="its timing slow",
    trained="its training runs",
    link="100mbit",
    step_ms=100.0,
    computing_ms=95.0,
    coding_ms=1.0,
    collectives=4.0,
    overlap=0.9,
    backward=0.5,
    asked={"gradients": 1e6, "weights": 1e6},
    moved={"gradients": 1e6, "weights": 1e6},
    error=0.001,
    perplexity_ratio=1.0,
    tolerance=0.03,
    memory=0.7,
)
"""nothing speaks for a change"""
WAITS = {"computing_ms": 40.0}
SLOW, SMALL = {**WAITS, "overlap": 0.1}, {**WAITS, "collectives": 12.0}
FULL, WORSE, CODING = {"memory": 0.95}, {"perplexity_ratio": 1.02}, {"coding_ms": 9.0}
INT8, INT4 = {"codec": "int8:group=128"}, {"codec": "int4:group=128", "error_feedback": True}
TWICE = {"moved": {"gradients": 2e6, "weights": 1e6}}
CHOICES = Choices(Space(), layers=8, steps=30 * 100)


def offered(strategy: dict[str, Any], **figures: Any) -> dict[str, str]:
    """Return by name what the actions change of a strategy."""
    values = {name: getattr(QUIET, name) for name in QUIET.__dataclass_fields__}
    incumbent = parse_strategy(strategy).canonical()
    offers = actions(incumbent, Measurements(**values | figures), CHOICES)
    return {action.name: action.change for _, action in offers}


CASES = [
    ("gather one unit further ahead", {"engine": "fsdp2"}, WAITS, "prefetch=none -> prefetch=1"),
    ("gather one unit further ahead", {"engine": "manual"}, WAITS, "prefetch=1 -> prefetch=2"),
    ("gather one unit less ahead", {"engine": "manual"}, FULL, "prefetch=1 -> prefetch=0"),
    (
        "keep all layers gathered",
        {"engine": "fsdp2"},
        WAITS,
        "reshard_after_forward=true -> reshard_after_forward=false",
    ),
    (
        "keep the last layers gathered",
        {"engine": "fsdp2"},
        WAITS,
        "overrides=none -> layers 4-7 reshard_after_forward=false",
    ),
    (
        "gather again in backward",
        {"engine": "fsdp2", "reshard_after_forward": False},
        FULL,
        "reshard_after_forward=false -> reshard_after_forward=true",
    ),
    ("widen the window by a layer", {"engine": "slide"}, WAITS, "window=2 -> window=3"),
    (
        "narrow the window by a layer",
        {"engine": "slide", "window": 3},
        FULL,
        "window=3 -> window=2",
    ),
    ("send twice as much at once", {"engine": "fsdp2"}, SMALL, "wrap_size=none -> wrap_size=2"),
    (
        "send twice as much at once",
        {"engine": "ddp"},
        SMALL,
        "bucket_mb=25.0 -> bucket_mb=100.0",
    ),
    (
        "send half as much at once",
        {"engine": "fsdp2", "wrap_size": 4},
        SLOW,
        "wrap_size=4 -> wrap_size=2",
    ),
    ("send half as much at once", {"engine": "ddp"}, SLOW, "bucket_mb=25.0 -> bucket_mb=5.0"),
    (
        "exchange gradients and sum them here",
        {"engine": "fsdp2"},
        TWICE,
        "gradients, none -> gradients, none, route=exchange",
    ),
    (
        "reduce gradients in bf16",
        {"engine": "fsdp2"},
        WAITS,
        "reduce_dtype=fp32 -> reduce_dtype=bf16",
    ),
    (
        "code gradients one step coarser",
        {"engine": "ddp"},
        WAITS,
        "gradients, none -> gradients, bf16",
    ),
    (
        "code gradients one step coarser",
        {"engine": "fsdp2", "gradients": INT8},
        WAITS,
        "gradients, int8:group=128 -> gradients, int4:group=128, error_feedback",
    ),
    (
        "code gradients one step finer",
        {"engine": "fsdp2", "gradients": INT4},
        WORSE,
        "gradients, int4:group=128, error_feedback -> gradients, int8:group=128",
    ),
    (
        "feed the error back",
        {"engine": "fsdp2", "gradients": INT8},
        {"error": 0.2},
        "gradients, int8:group=128 -> gradients, int8:group=128, error_feedback",
    ),
    (
        "stop feeding the error back",
        {"engine": "fsdp2", "gradients": INT4},
        CODING,
        "gradients, int4:group=128, error_feedback -> gradients, int4:group=128",
    ),
    (
        "code weights one step coarser",
        {"engine": "manual"},
        WAITS,
        "weights=none -> weights(codec=int8:group=128)",
    ),
    (
        "code weights one step finer",
        {"engine": "manual", "weights": {"codec": "int8:group=128"}},
        WORSE,
        "weights(codec=int8:group=128) -> weights=none",
    ),
    (
        "synchronise parameters instead of gradients",
        {"engine": "ddp"},
        WAITS,
        "sync=none -> sync(every=8 momentum=0.0)",
    ),
    (
        "synchronise half as often",
        {"engine": "ddp", "sync": {"every": 16}},
        WAITS,
        "sync(every=16 momentum=0.5) -> sync(every=32 momentum=0.5)",
    ),
    (
        "synchronise twice as often",
        {"engine": "ddp", "sync": {"every": 64}},
        WORSE,
        "sync(every=64 momentum=0.5) -> sync(every=32 momentum=0.5)",
    ),
    (
        "recompute more activations",
        {"engine": "ddp"},
        FULL,
        "activation_checkpointing=none -> activation_checkpointing=selective",
    ),
    (
        "recompute fewer activations",
        {"engine": "ddp", "activation_checkpointing": "full"},
        {"memory": 0.2},
        "activation_checkpointing=full -> activation_checkpointing=selective",
    ),
]


@pytest.mark.parametrize(("name", "strategy", "figures", "change"), CASES)
def test_a_fact_speaks_for_each_action(name, strategy, figures, change):
    assert offered(strategy, **figures)[name] == change
    assert name not in offered(strategy)


def test_every_action_is_among_these_cases():
    assert {rule.name for rule in RULES} == {name for name, *_ in CASES}


@pytest.mark.parametrize("strategy", [strategy for _, strategy, *_ in CASES])
def test_an_action_changes_one_setting_and_nothing_else(strategy):
    incumbent = parse_strategy(strategy).canonical()
    measured = Measurements(
        **{**vars(QUIET), **WAITS, **SMALL, **SLOW, **WORSE, **CODING, "error": 0.2}
    )
    offers = list(actions(incumbent, measured, CHOICES))
    assert offers
    for strategy, action in offers:
        assert len(differences(incumbent, strategy)) == 1, action
    assert len({strategy.hash() for strategy, _ in offers}) == len(offers)


def test_a_coarser_codec_keeps_the_other_options_of_compression():
    options = {"minimum_size": 64, "exclude": ["*.bias"], "warmup_steps": 7}
    feedback = {"error_feedback": True, "residual": "bf16", "decay": 0.9}
    for before, after in (
        (INT8, {"codec": INT4["codec"], "error_feedback": True}),
        (INT8 | feedback, INT4 | feedback),
    ):
        incumbent, expected = (
            parse_strategy({"engine": "fsdp2", "gradients": part | options}).canonical()
            for part in (before, after)
        )
        offers = actions(incumbent, Measurements(**{**vars(QUIET), **WAITS}), CHOICES)
        (changed,) = [s for s, action in offers if action.name == "code gradients one step coarser"]
        assert changed == expected


@pytest.mark.parametrize(("warmup", "offered_every"), [(1080, 64), (1081, None)])
def test_half_as_often_is_offered_where_training_synchronises_thirty_times(warmup, offered_every):
    sync = {"every": 32, "warmup_steps": warmup}
    incumbent = parse_strategy({"engine": "ddp", "sync": sync}).canonical()
    offers = actions(incumbent, Measurements(**{**vars(QUIET), **WAITS}), CHOICES)
    longer = [s.sync.every for s, a in offers if a.name == "synchronise half as often" and s.sync]
    assert longer == ([] if offered_every is None else [offered_every])


def test_the_facts_are_those_of_the_incumbents_training_on_the_link_of_the_search():
    history = Machine(rate="100mbit").begin()
    runs = history.start_results.trained
    measured = Measurements.of(
        history, (), 2 * runs[0].profiled_step_ms, memory=0.7, tolerance=0.03
    )
    computing = fmean(run.profiled_step_ms - run.exposed_comm_ms for run in runs)
    assert measured.computing_ms == pytest.approx(computing)
    assert measured.waits == pytest.approx(1 - computing / measured.step_ms)
    assert measured.moved["weights"] == runs[0].ledger["weights"]["bytes_wire"]
    assert (measured.source, measured.perplexity_ratio) == ("its training runs", 1.0)


def test_an_incumbent_that_was_only_timed_has_the_facts_of_its_own_timing():
    """Of fsdp2, which alone was trained, ddp has the perplexity, and neither gathers nor waits."""
    trace = make_breakdown(120.0, 0.25, 0.05)
    slow = [
        make_timed("slow", run, step_ms=[step] * 6, breakdown=trace)
        for run, step in (("fsdp2", 200.0), ("ddp", 100.0))
    ]
    timed = [*slow, make_timed("two-ranks", "ddp"), make_timed("one-rank", "ddp", world_size=1)]
    machine = Machine(rate="100mbit")
    history = with_best_incumbent(machine.begin(timed=(*timed,), runs=["fsdp2"]), 0.03, 10**15, {})
    assert history.incumbent_results.strategy.engine == "ddp"
    measured = Measurements.of(history, timed, 500.0, memory=0.7, tolerance=0.03)
    assert (measured.source, measured.trained) == ("its timing slow", "run fsdp2")
    assert measured.waits == pytest.approx(0.25)
    assert measured.moved == {
        "gradients": slow[1].ledger["gradients"]["bytes_wire"],
        "weights": 0.0,
    }
    assert "25 % of a step of 120.0 ms on link 100mbit waits" in (exposed(measured) or "")
    assert moved_twice(measured) is None
    assert gathers_exposed(measured) is None
    assert measured.perplexity_ratio == 1.0
    agent = machine.agent(candidates="action", max_candidates=16)
    candidates = machine.propose(history, choose_by_rules, agent, timed=(*timed,)).candidates
    assert candidates
    for candidate in candidates:
        assert candidate.strategy.engine == "ddp" and candidate.action
        assert candidate.action.name != "exchange gradients and sum them here"
        if "waits" in candidate.action.fact:
            assert candidate.action.fact.startswith("25 % of a step of 120.0 ms")


def test_the_latest_race_on_the_link_of_the_search_counts():
    machine = Machine(rate="100mbit")
    history = machine.begin()
    proposal = machine.propose(history, choose_by_rules)
    race = machine.race(proposal, machine.agent())
    elsewhere = [run.model_copy(update={"link": "1gbit"}) for run in race.runs]
    elsewhere = [run.model_copy(update={"timing": "round-2"}) for run in elsewhere]
    after = history.with_results([*race.runs, *elsewhere])
    measured = Measurements.of(
        after, [make_timed("slow", "fsdp2")], None, memory=0.7, tolerance=0.03
    )
    (run,) = [run for run in race.runs if run.run == history.incumbent]
    assert measured.source == "its race round-1"
    assert measured.step_ms == run.breakdown.profiled_step_ms


def test_an_untrained_incumbent_has_the_quality_of_equal_numerics():
    history = Machine(rate="100mbit").begin()
    row = next(row for row in history.measured.values() if row.source == "run fsdp2-int8")
    near = parse_strategy({**row.strategy.model_dump(mode="json"), "prefetch": 1}).canonical()
    raced = make_timed("race").model_copy(update=in_round(near, 1, "race"))
    changed = history.with_results([raced]).model_copy(update={"incumbent": near.hash()})
    timed = [make_timed("slow", "fsdp2-int8", strategy_hash=near.hash())]
    measured = Measurements.of(changed, timed, None, memory=0.7, tolerance=0.03)
    assert (measured.source, measured.trained) == ("its timing slow", "run fsdp2-int8")
    assert measured.error == row.trained[0].grad_rel_error
