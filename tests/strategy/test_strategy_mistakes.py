"""A mistake in a strategy is answered in one line."""

from typing import Any

import pytest

import shardlab
from shardlab.core.errors import UserError
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.strategy.validation import check_fits

NAMES = [f"'{name}'" for name in ENGINES]


@pytest.mark.parametrize(
    "document, message",
    [
        (
            {"engine": "dpp"},
            f"strategy.engine: input should be {', '.join(NAMES[:-1])} or {NAMES[-1]} (found "
            "'dpp')",
        ),
        (
            {"engine": "ddp", "wrap": "root"},
            "strategy: wrap does not apply to engine 'ddp': remove it",
        ),
        (
            {
                **{"sharding": "hybrid_shard", "replicas": 2, "sync": {"every": 4}},
                "gradients": {"codec": "int8", "between_nodes": "int4"},
            },
            "strategy: no gradients are sent between copies of the model: give the codec to sync, "
            "or set its warmup_steps",
        ),
        (
            {"sharding": "hybrid_shard"},
            "strategy: hybrid_shard and replicas belong together: give both or none",
        ),
        (
            {"param_dtype": "fp16", "gradients": {"codec": "int8", "error_feedback": True}},
            "strategy: error_feedback keeps what was not sent in units of the loss scale, which "
            "changes with param_dtype: fp16: use bf16",
        ),
        (
            {"overrides": [{"layers": "3-x", "param_dtype": "bf16"}]},
            "strategy.overrides.0.layers: expected layers such as 3, '0-3' or '0-2,7' "
            "(found '3-x')",
        ),
        (
            {"wrap": "root", "overrides": [{"layers": 3, "param_dtype": "bf16"}]},
            "strategy: overrides: layers: with wrap: root units are not single blocks: use "
            "wrap: block",
        ),
        (
            {
                "activations": "disk",
                "overrides": [
                    {"layers": 0, "activation_checkpointing": "full"},
                    {"layers": 0, "activation_checkpointing": "none"},
                ],
            },
            "strategy: activations: disk is for inputs of checkpointed blocks: set "
            "activation_checkpointing: full, or remove it",
        ),
        (
            {"engine": "ddp", "reduce_dtype": "bf16"},
            "strategy: reduce_dtype does not apply to engine 'ddp': remove it, or cast gradients "
            "by `gradients: {codec: bf16}`",
        ),
        (
            {"engine": "slide", "sync": {"every": 8}},
            "strategy: sync does not apply to engine 'slide': remove it, or take ddp, fsdp2 or "
            "manual, whose copies can train alone",
        ),
        (
            {"engine": "ddp", "sync": {"every": 8, "codec": "sign"}},
            "strategy.sync: codec 'sign' votes, and outer gradients need means of one message "
            "each: choose another",
        ),
        (
            {"engine": "ddp", "sync": {"every": 8, "codec": "sketch"}},
            "strategy.sync: codec 'sketch' sums in several phases, and outer gradients need means "
            "of one message each: choose another",
        ),
        (
            {"gradients": "int9"},
            "strategy.gradients.codec: unknown codec 'int9'; did you mean 'int4' or 'int8'?",
        ),
        (
            {"weights": {"name": "int8"}},
            "strategy.weights.name: unknown key; valid: codec, minimum_size",
        ),
        (
            {"engine": "slide", "compile": True},
            "strategy: compile needs parameters whose storage does not change: remove it, or "
            "engine: slide",
        ),
        (
            {"activations": "disk", "activation_checkpointing": "full", "compile": True},
            "strategy: activations: disk cannot store what compiled blocks keep: remove "
            "it, or compile",
        ),
        (
            {"gradients": {"codec": "int8", "route": "native"}},
            "strategy.gradients: route: native is for codec 'none' alone: use route: exchange",
        ),
        (
            {"gradients": {"codec": "int8:gruop=8"}},
            "strategy.gradients.codec.gruop: unknown key; did you mean 'group'?",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_strategy(document)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "document, message",
    [
        (
            {"sharding": "hybrid_shard", "replicas": 3},
            "replicas: 3 copies do not divide 4 ranks",
        ),
        (
            {"sharding": "hybrid_shard", "replicas": 4},
            "replicas: 4 copies on as many ranks shard nothing: use no_shard",
        ),
        (
            {"sharding": "hybrid_shard", "replicas": 2, "reshard_after_forward": 4},
            "reshard_after_forward: 4 does not divide the 2 ranks of a copy",
        ),
        (
            {"accumulation": 3},
            "accumulation: 3 micro-batches do not divide the 8 samples that a rank has in a step",
        ),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_fits(parse_strategy(document), world_size=4, samples=8)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("document", "values", "message"),
    [
        (shardlab.Compression, {"codec": "int9"}, "Compression.codec: unknown codec 'int9'; did"),
        (shardlab.Strategy, {"engine": "fsdp3"}, "Strategy.engine: input should be 'ddp', "),
        (
            shardlab.Strategy,
            {"gradients": {"codec": "int8", "decay": 0.5}},
            "Strategy.gradients: decay does nothing without error_feedback: remove it",
        ),
        (shardlab.Sync, {"every": 2, "delay": 2}, "Sync: delay 2 must be below every 2: "),
        (shardlab.Sync, {"every": 2, "learning_rat": 1}, "Sync.learning_rat: unknown key; did you"),
    ],
)
def test_a_mistake_in_a_document_made_in_python_is_one_line(
    document: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refusal:
        document(**values)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)
