import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.agent.proposals.candidates import actions, draft_candidates
from shardlab.agent.proposals.changes import changes, in_words
from shardlab.agent.proposals.seeds import default, heuristic, random_strategies
from shardlab.strategy.strategy import Strategy, parse_strategy
from tests.agent.searches import LIMIT, begin

ANY_STRATEGY = st.integers(0, 10_000).map(lambda seed: random_strategies(seed, 1)[0])
# settings that follow from another one, and so may change with it
CONSEQUENCES = {
    "codec": {"route", "minimum_size", "error_feedback"},
    "weights": {"weights_minimum_size"},
    "engine": {
        *("sharding", "placement", "wrap", "reshard_after_forward", "bucket_mb"),
        *("weights", "weights_minimum_size", "prefetch", "route"),
    },
    "wrap": {"reshard_after_forward"},
}


@given(ANY_STRATEGY)
def test_action_is_valid_and_changes_one_setting(strategy: Strategy):
    drafts = actions(strategy)
    assert drafts
    for draft in drafts:
        keys = {change.key for change in changes(strategy, parse_strategy(draft.document))}
        assert any(keys <= {key, *CONSEQUENCES.get(key, ())} for key in keys), (
            f"{draft.why}: {keys}"
        )


@given(ANY_STRATEGY, st.data())
def test_every_action_can_be_undone(strategy: Strategy, data: st.DataObject):
    draft = data.draw(st.sampled_from(actions(strategy)))
    setting = draft.why.removeprefix("action: ").partition(":")[0]
    undone = [parse_strategy(each.document) for each in actions(parse_strategy(draft.document))]
    assert any(setting not in {change.key for change in changes(strategy, each)} for each in undone)


@given(ANY_STRATEGY)
def test_changes_are_empty_iff_strategies_are_equivalent(strategy: Strategy):
    assert changes(strategy, strategy.canonical()) == ()
    assert (changes(strategy, default()) == ()) == (strategy.hash() == default().hash())


@pytest.mark.parametrize(
    "document",
    [
        {"sharding": "no_shard"},
        {"wrap": "size", "wrap_size": 9, "prefetch": 2},
        {"engine": "manual", "overrides": [{"layers": 0, "reshard_after_forward": False}]},
        {"engine": "fsdp1", "use_orig_params": False, "compile": True},
    ],
)
def test_every_action_on_an_unusual_strategy_is_valid(document):
    for draft in actions(parse_strategy(document)):
        parse_strategy(draft.document)


def test_changes_in_words():
    before, after = Strategy(), parse_strategy({"gradients": {"codec": "int8:group=64"}})
    assert in_words(changes(before, after)) == (
        "codec: none to int8:group=64; minimum_size: 0 to 1024; route: native to exchange"
    )


@pytest.mark.parametrize("mode", ["action", "config"])
def test_drafts_are_deterministic(mode):
    named = {"mine": parse_strategy({"wrap": "root"})}
    once = draft_candidates(mode, begin(), named, LIMIT)
    assert once == draft_candidates(mode, begin(), named, LIMIT)


def test_config_mode_offers_every_source():
    named = {"mine": parse_strategy({"wrap": "root"})}
    whys = " | ".join(each.why for each in draft_candidates("config", begin(), named, LIMIT))
    for source in ("strategies.mine", "the default", "rules of thumb", "at random", "near run"):
        assert source in whys


def test_kinds_of_actions_alternate():
    early = [each.why for each in actions(Strategy())[:6]]
    kinds = [why.removeprefix("action: ").partition(":")[0] for why in early]
    assert kinds == ["reshard_after_forward", "prefetch", "codec", "weights", "engine", "route"]


def labels(strategy: Strategy) -> set[str]:
    return {parse_strategy(draft.document).label() for draft in actions(strategy)}


def test_coarse_codecs_are_offered_with_removable_error_feedback():
    offered = labels(Strategy())
    for codec in ("int4:group=128", "efsign:group=512", "onebit:group=512", "powersgd:rank=4"):
        assert f"fsdp2, {codec}, error feedback" in offered
        strategy = parse_strategy({"gradients": {"codec": codec, "error_feedback": True}})
        assert f"fsdp2, {codec}" in labels(strategy)
    for codec in ("bf16", "fp8:format=e4m3", "int8:group=128"):
        assert f"fsdp2, {codec}" in offered
        strategy = parse_strategy({"gradients": {"codec": codec}})
        assert f"fsdp2, {codec}, error feedback" in labels(strategy)


def test_weight_codec_can_be_added_and_removed():
    coded = parse_strategy({"weights": {"codec": "int8"}})
    assert coded.label() in labels(Strategy())
    assert Strategy().label() in labels(coded)
    assert not any("weights" in label for label in labels(parse_strategy({"engine": "ddp"})))


def test_changing_the_codec_keeps_the_bypass_settings():
    kept = {"exclude": ["*.bias"], "warmup_steps": 5, "minimum_size": 64}
    gradients = {"codec": "int4", "error_feedback": True, "residual": "bf16", **kept}
    strategy = parse_strategy({"gradients": gradients})
    for draft in actions(strategy):
        after = parse_strategy(draft.document)
        if draft.why.startswith("action: codec") and after.gradients.codec.name != "none":
            assert after.gradients.model_dump(include=set(kept)) == {**kept, "exclude": ("*.bias",)}
    assert "fsdp2, int4:group=128 from 64 elements, without *.bias, after 5 steps" in labels(
        strategy
    )


def test_random_strategies_repeat_by_seed():
    assert random_strategies(7, 5) == random_strategies(7, 5)
    assert random_strategies(7, 5) != random_strategies(8, 5)


def test_heuristic_shards_no_further_than_memory_requires():
    history = begin()
    assert heuristic(history, LIMIT).engine == "ddp"
    peak = history.incumbent.measurements[0].memory_peak_bytes
    # sharded in two: 8 P resident; kept after forward 12 P; ddp 16 P
    parameters = history.workload.parameters
    kept = heuristic(history, peak + 5 * parameters)
    assert (kept.engine, kept.reshard_after_forward) == ("fsdp2", False)
    assert heuristic(history, 1).reshard_after_forward is None


def test_heuristic_compresses_only_exposed_communication():
    waits = begin()
    assert heuristic(waits, LIMIT).gradients.codec.name == "bf16"
    measurements = [
        each.model_copy(update={"exposed_comm_ms": 0.01}) for each in waits.incumbent.measurements
    ]
    incumbent = waits.incumbent.model_copy(update={"measurements": measurements})
    hidden = waits.model_copy(update={"incumbent": incumbent})
    assert heuristic(hidden, LIMIT).gradients.codec.name == "none"
