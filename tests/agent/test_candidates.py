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
def test_an_action_is_legal_and_changes_one_setting(strategy: Strategy):
    drafts = actions(strategy)
    assert drafts
    for draft in drafts:
        keys = {change.key for change in changes(strategy, parse_strategy(draft.document))}
        assert any(keys <= {key, *CONSEQUENCES.get(key, ())} for key in keys), (
            f"{draft.why}: {keys}"
        )


@given(ANY_STRATEGY, st.data())
def test_a_second_action_sets_the_changed_setting_back(strategy: Strategy, data: st.DataObject):
    draft = data.draw(st.sampled_from(actions(strategy)))
    setting = draft.why.removeprefix("action: ").partition(":")[0]
    undone = [parse_strategy(each.document) for each in actions(parse_strategy(draft.document))]
    assert any(setting not in {change.key for change in changes(strategy, each)} for each in undone)


@given(ANY_STRATEGY)
def test_changes_are_empty_for_equal_meanings_alone(strategy: Strategy):
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
def test_drafts_are_a_function_of_the_history(mode):
    named = {"mine": parse_strategy({"wrap": "root"})}
    once = draft_candidates(mode, begin(), named, LIMIT)
    assert once == draft_candidates(mode, begin(), named, LIMIT)


def test_config_mode_offers_every_source():
    named = {"mine": parse_strategy({"wrap": "root"})}
    whys = " | ".join(each.why for each in draft_candidates("config", begin(), named, LIMIT))
    for source in ("strategies.mine", "the default", "rules of thumb", "at random", "near run"):
        assert source in whys


def test_actions_of_every_kind_come_early():
    early = [each.why for each in actions(Strategy())[:6]]
    kinds = [why.removeprefix("action: ").partition(":")[0] for why in early]
    assert kinds == ["reshard_after_forward", "prefetch", "codec", "weights", "engine", "route"]


def labels(strategy: Strategy) -> set[str]:
    return {parse_strategy(draft.document).label() for draft in actions(strategy)}


def test_coarse_codecs_come_with_error_feedback_which_another_action_takes_off():
    offered = labels(Strategy())
    for codec in ("int4:group=128", "efsign:group=512", "onebit:group=512", "powersgd:rank=4"):
        assert f"fsdp2, {codec}, error feedback" in offered
        strategy = parse_strategy({"gradients": {"codec": codec, "error_feedback": True}})
        assert f"fsdp2, {codec}" in labels(strategy)
    for codec in ("bf16", "fp8:format=e4m3", "int8:group=128"):
        assert f"fsdp2, {codec}" in offered
        strategy = parse_strategy({"gradients": {"codec": codec}})
        assert f"fsdp2, {codec}, error feedback" in labels(strategy)


def test_gathered_weights_get_a_codec_and_lose_it_again():
    coded = parse_strategy({"weights": {"codec": "int8"}})
    assert coded.label() in labels(Strategy())
    assert Strategy().label() in labels(coded)
    assert not any("weights" in label for label in labels(parse_strategy({"engine": "ddp"})))


def test_another_codec_leaves_the_filters_of_the_gradients_alone():
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


def test_heuristic_shards_only_as_far_as_memory_asks():
    history = begin()
    assert heuristic(history, LIMIT).engine == "ddp"
    peak = history.incumbent.measurements[0].memory_peak_bytes
    # sharded in two: 8 P resident; kept after forward 12 P; ddp 16 P
    parameters = history.workload.parameters
    kept = heuristic(history, peak + 5 * parameters)
    assert (kept.engine, kept.reshard_after_forward) == ("fsdp2", False)
    assert heuristic(history, 1).reshard_after_forward is None


def test_heuristic_compresses_only_where_communication_is_waited_for():
    waits = begin()
    assert heuristic(waits, LIMIT).gradients.codec.name == "bf16"
    measurements = [
        each.model_copy(update={"exposed_comm_ms": 0.01}) for each in waits.incumbent.measurements
    ]
    incumbent = waits.incumbent.model_copy(update={"measurements": measurements})
    hidden = waits.model_copy(update={"incumbent": incumbent})
    assert heuristic(hidden, LIMIT).gradients.codec.name == "none"
