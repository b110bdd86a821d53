"""Canonical form, hash and label of a strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from shardlab.core.document import validate
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.engine_traits import ENGINES, inapplicable
from shardlab.strategy.settings import Override
from shardlab.strategy.sync import Sync
from tests.strategy.drawn_strategies import documents

FROZEN = Path(__file__).with_name("frozen_hashes.json")
"""strategies of params.yaml, params/*.yaml and committed records, by their hashes"""


@given(documents())
def test_the_canonical_form_is_a_valid_strategy_of_the_same_hash(document: dict[str, Any]) -> None:
    strategy = parse_strategy(document)
    written = json.loads(json.dumps(strategy.canonical().model_dump(mode="json")))
    assert parse_strategy(written).canonical() == strategy.canonical()
    assert strategy.canonical().canonical() == strategy.canonical()
    assert parse_strategy(written).hash() == strategy.hash()


@given(documents(), documents())
def test_hashes_and_labels_are_equal_just_when_meanings_are(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = parse_strategy(one), parse_strategy(other)
    assert (a.hash() == b.hash()) == (a.canonical() == b.canonical())
    assert (a.label() == b.label()) == (a.hash() == b.hash())
    assert a.label() == a.canonical().label()


@pytest.mark.parametrize(
    "one, other",
    [
        ({}, {"engine": "fsdp2", "wrap": "block", "reshard_after_forward": True}),
        ({}, {"sharding": "full_shard", "placement": "dim0", "param_dtype": "auto"}),
        ({"sharding": "shard_grad_op"}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": 1}, {"reshard_after_forward": False}),
        ({"prefetch": 2}, {"prefetch": 2, "prefetch_backward": 2}),
        ({}, {"async_unshard": False}),
        (
            {"engine": "fsdp1"},
            {"engine": "fsdp1", "prefetch_backward": 1, "use_orig_params": False},
        ),
        (
            {"overrides": [{"layers": "0-3", "reshard_after_forward": False}]},
            {
                "overrides": [
                    {"layers": [2, 3, "1"], "reshard_after_forward": True},
                    {"layers": "0,1", "reshard_after_forward": False},
                    {"layers": "2-3", "reshard_after_forward": False},
                ]
            },
        ),
        (
            {"overrides": [{"module": "head"}]},
            {"overrides": [{"module": "head", "param_dtype": "auto"}, {"module": "head"}]},
        ),
        (
            {"engine": "manual"},
            {"engine": "manual", "prefetch": 1, "gradients": {"route": "exchange"}},
        ),
        ({}, {"gradients": {"codec": "none", "route": "native", "minimum_size": 7}}),
        (
            {"gradients": {"codec": "int8:group=128"}},
            {"gradients": {"codec": {"name": "int8"}, "route": "exchange"}},
        ),
    ],
)
def test_defaults_written_out_mean_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert parse_strategy(one).hash() == parse_strategy(other).hash()


@pytest.mark.parametrize("case", json.loads(FROZEN.read_text()), ids=lambda case: case["hash"])
def test_committed_hashes_stay(case: dict[str, Any]) -> None:
    """Trials are stored under these hashes: another value throws every stored trial away."""
    assert parse_strategy(case["strategy"]).hash() == case["hash"]


@given(documents())
def test_whatever_is_read_as_canonical_is_made_canonical(document: dict[str, Any]) -> None:
    canonical = parse_strategy(document).canonical()
    for value in (document, parse_strategy(document), canonical.model_dump(mode="json")):
        read = validate(CanonicalStrategy, value, "strategy")
        assert type(read) is CanonicalStrategy
        assert read == canonical


def test_traits_are_of_settings_that_the_engine_has() -> None:
    for name, traits in ENGINES.items():
        assert {*traits.defaults} <= traits.settings
        assert not traits.settings & inapplicable(name)


def test_the_label_names_what_is_not_the_default() -> None:
    gradients = {
        "codec": "int4:group=64,levels=nf4",
        "error_feedback": True,
        "residual": "bf16",
        "minimum_size": 0,
        "exclude": ["*.bias", "*norm*"],
        "warmup_steps": 20,
    }
    weights = {"codec": "int8", "minimum_size": 4096}
    assert parse_strategy({"gradients": gradients, "weights": weights}).label() == (
        "fsdp2, int4:group=64,levels=nf4, error_feedback, residual=bf16, minimum_size=0, "
        "exclude=*.bias *norm*, warmup_steps=20, weights=int8:group=128 minimum_size=4096"
    )
    nodes = {"codec": "int8", "between_nodes": "int4", "ranks_per_node": 4}
    assert parse_strategy({"gradients": nodes}).label() == (
        "fsdp2, int8:group=128, between_nodes=int4:group=128, ranks_per_node=4"
    )


def test_the_page_of_strategies_has_every_override() -> None:
    text = (Path(__file__).parents[2] / "docs/strategies.md").read_text()
    assert [field for field in Override.model_fields if f"`{field}`" not in text] == []


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize(
    ("codec", "enough"),
    [("topk:density=0.05", 20), ("randomk:density=0.01", 100), ("sketch:density=0.3", 4)],
)
def test_a_run_is_too_short_for_a_sparse_codec_below_one_over_its_density(
    codec: str, enough: int, error_feedback: bool
) -> None:
    """So many messages hold no more than all elements."""
    given = {"codec": codec, "error_feedback": error_feedback}
    gradients = parse_strategy({"gradients": given}).gradients
    assert gradients.left_out(enough) is None
    share = round(100 * (enough - 1) * gradients.codec.most_sent())
    said = f"sends at most {share} % of the gradients in {enough - 1} steps: set warmup_steps"
    assert said in str(gradients.left_out(enough - 1))
    warm = parse_strategy({"gradients": {**given, "warmup_steps": 1}}).gradients
    assert warm.left_out(2) is None


def test_a_run_has_fewer_exchanges_than_steps_for_a_sparse_codec() -> None:
    """The exchange after the last step included."""
    given = {"every": 8, "codec": "topk:density=0.25", "error_feedback": True}
    sync = validate(Sync, given, "")
    assert sync.left_out() is sync.left_out(25) is None
    said = "sends at most 75 % of the outer gradients in 3 synchronisations: set warmup_steps"
    assert said in str(sync.left_out(24))
    assert validate(Sync, {**given, "warmup_steps": 1}, "").left_out(24) is None
    dropped = validate(Sync, {**given, "error_feedback": False}, "")
    assert "fewer than 4 synchronisations cannot send all outer gradients" in str(
        dropped.left_out()
    )
