"""Actions: each has its evidence, changes one setting, and is offered for no other reason."""

from statistics import fmean
from typing import Any

import pytest

from shardlab.config.schema import Space
from shardlab.config.strategy import differences, parse_strategy
from shardlab.search.actions import RULES, Offer, actions
from shardlab.search.facts import Facts
from tests.search.machine import Machine

QUIET = Facts(
    source="its training runs",
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
OFFER = Offer(Space(), layers=8, longest_round=100)


def offered(strategy: dict[str, Any], **facts: Any) -> dict[str, str]:
    """Return by name what the actions change of a strategy."""
    values = {name: getattr(QUIET, name) for name in QUIET.__dataclass_fields__}
    incumbent = parse_strategy(strategy).canonical()
    found = actions(incumbent, Facts(**values | facts), OFFER)
    return {action.name: action.change for _, action in found}


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


@pytest.mark.parametrize(("name", "strategy", "facts", "change"), CASES)
def test_a_fact_speaks_for_each_action(name, strategy, facts, change):
    assert offered(strategy, **facts)[name] == change
    assert name not in offered(strategy)


def test_every_action_is_among_these_cases():
    assert {rule.name for rule in RULES} == {name for name, *_ in CASES}


@pytest.mark.parametrize("strategy", [strategy for _, strategy, *_ in CASES])
def test_an_action_changes_one_setting_and_nothing_else(strategy):
    incumbent = parse_strategy(strategy).canonical()
    facts = Facts(**{**vars(QUIET), **WAITS, **SMALL, **SLOW, **WORSE, **CODING, "error": 0.2})
    found = list(actions(incumbent, facts, OFFER))
    assert found
    for changed, action in found:
        assert len(differences(incumbent, changed)) == 1, action
    assert len({changed.hash() for changed, _ in found}) == len(found)


def test_the_facts_are_those_of_the_incumbents_training_on_the_link_of_the_search():
    history = Machine(rate="100mbit").begin()
    runs = history.reference.trained
    facts = Facts.of(history, 2 * runs[0].profiled_step_ms, memory=0.7, tolerance=0.03)
    computing = fmean(run.profiled_step_ms - run.exposed_comm_ms for run in runs)
    assert facts.computing_ms == pytest.approx(computing)
    assert facts.waits == pytest.approx(1 - computing / facts.step_ms)
    assert facts.moved["weights"] == runs[0].ledger["weights"]["bytes_wire"]
    assert (facts.source, facts.perplexity_ratio) == ("its training runs", 1.0)


def test_an_incumbent_that_was_only_raced_has_the_facts_of_what_is_most_like_it():
    history = Machine(rate="100mbit").begin()
    row = next(row for row in history.measured.values() if row.source == "run fsdp2-int8")
    near = parse_strategy({**row.strategy.model_dump(mode="json"), "prefetch": 1}).canonical()
    raced = row.model_copy(update={"strategy": near, "hash": near.hash(), "trained": []})
    measured = {**history.measured, raced.hash: raced}
    changed = history.model_copy(update={"measured": measured, "incumbent": raced.hash})
    assert Facts.of(changed, None, memory=0.7, tolerance=0.03).source == "run fsdp2-int8"
