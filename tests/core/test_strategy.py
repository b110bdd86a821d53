import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.core.legality import check_fits
from shardlab.core.overrides import Override
from shardlab.core.strategy import Strategy, parse_strategy

CODECS = st.one_of(
    st.sampled_from(["none", "bf16", "int8", "topk"]),
    st.integers(1, 512).map(lambda n: {"name": "int8", "group": 8 * n}),
    st.floats(0.001, 1).map(lambda x: {"name": "topk", "density": x}),
)


@st.composite
def compressions(draw: st.DrawFn) -> dict[str, Any]:
    codec = draw(CODECS)
    plain = codec == "none"
    options = {
        "codec": st.just(codec),
        "route": st.sampled_from([None, "exchange", *(["native"] if plain else [])]),
        "error_feedback": st.just(False) if plain else st.booleans(),
        "minimum_size": st.integers(0, 10_000),
        "exclude": st.sampled_from([[], ["*.bias"], ["*.bias", "*norm*"]]),
        "warmup_steps": st.integers(0, 3),
    }
    document = draw(st.fixed_dictionaries({}, optional=options))
    if document.get("error_feedback"):
        document["residual"] = draw(st.sampled_from(["fp32", "bf16", "int8"]))
    if draw(st.booleans()):
        document["between_nodes"] = draw(CODECS)
        document["ranks_per_node"] = draw(st.none() | st.integers(2, 8))
    return document


WEIGHTS = st.fixed_dictionaries(
    {},
    optional={
        "codec": CODECS.filter(lambda codec: "topk" not in str(codec)),
        "minimum_size": st.integers(0, 10_000),
    },
)


DTYPES = st.sampled_from(["auto", "fp32", "bf16"])
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "gradients": compressions(),
    "param_dtype": DTYPES,
    "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
    "activations": st.sampled_from(["device", "memory", "disk"]),
    "compile": st.booleans(),
    "accumulation": st.none() | st.integers(1, 4),
}
SHARDED: dict[str, st.SearchStrategy[Any]] = {
    "wrap": st.sampled_from([None, "block", "root", "size"]),
    "wrap_size": st.none() | st.integers(1, 3),
    "sharding": st.sampled_from([None, "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]),
    "replicas": st.none() | st.integers(2, 3),
    "reshard_after_forward": st.sampled_from([None, True, False, 1, 2]),
    "prefetch": st.none() | st.integers(0, 3),
    "prefetch_backward": st.none() | st.integers(0, 3),
    "reduce_dtype": st.sampled_from(["fp32", "bf16"]),
    "reduce_every_micro_batch": st.booleans(),
    "weights": st.none() | WEIGHTS,
}
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ddp": {"bucket_mb": st.none() | st.floats(0.1, 100)},
    "fsdp1": {
        "limit_all_gathers": st.none() | st.booleans(),
        "use_orig_params": st.none() | st.booleans(),
        "offload": st.booleans(),
    },
    "fsdp2": {
        "placement": st.sampled_from([None, "dim0", "dim1", "largest"]),
        "async_unshard": st.none() | st.booleans(),
        "output_dtype": st.sampled_from([None, "fp32", "bf16"]),
        "offload": st.booleans(),
    },
    "manual": {},
    "slide": {
        "wrap": st.sampled_from([None, "block", "size"]),
        "wrap_size": st.none() | st.integers(1, 3),
        "window": st.none() | st.integers(2, 4),
        "param_transfer": st.sampled_from([None, "full", "shard"]),
        "grad_sync": st.sampled_from([None, "cpu_reduce", "gpu_reduce"]),
        "reduce_dtype": st.sampled_from(["fp32", "bf16"]),
        "reduce_every_micro_batch": st.booleans(),
        "weights": st.none() | WEIGHTS,
    },
}


@st.composite
def overrides(draw: st.DrawFn) -> dict[str, Any]:
    numbers = st.integers(0, 5)
    layers = st.one_of(
        numbers,
        st.lists(numbers, min_size=1, max_size=3),
        st.tuples(numbers, numbers).map(lambda ends: f"{min(ends)}-{max(ends)}"),
    )
    where = draw(st.fixed_dictionaries({"layers": layers}) | st.just({"module": "head"}))
    options = {"reshard_after_forward": st.booleans(), "param_dtype": DTYPES}
    if "layers" in where:
        options["activation_checkpointing"] = st.sampled_from(["none", "full"])
    return where | draw(st.fixed_dictionaries({}, optional=options))


def is_legal(document: dict[str, Any]) -> bool:
    try:
        parse_strategy(document)
    except UserError:
        return False
    return True


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Strategies as a user may write them, with any part left out."""
    engine = draw(st.sampled_from([*OWN]))
    options = COMMON | OWN[engine] | ({} if engine in ("ddp", "slide") else SHARDED)
    # few settings at a time: most combinations of many are refused
    keys = draw(st.lists(st.sampled_from(sorted(options)), max_size=3, unique=True))
    document = {"engine": engine} | {key: draw(options[key]) for key in keys}
    if draw(st.booleans()):
        document["overrides"] = draw(st.lists(overrides(), max_size=3))
    if engine == "fsdp2" and draw(st.booleans()):
        del document["engine"]
    assume(is_legal(document))
    return document


def reverse(value: Any) -> Any:
    """The same mapping with its keys in another order, at every depth."""
    if isinstance(value, dict):
        return {key: reverse(value[key]) for key in reversed(value)}
    return value


@given(documents())
def test_the_normal_form_is_its_own_normal_form(document: dict[str, Any]) -> None:
    normal = parse_strategy(document).normal()
    assert normal.normal() == normal


@given(documents())
def test_the_normal_form_is_a_valid_strategy_of_the_same_hash(document: dict[str, Any]) -> None:
    strategy = parse_strategy(document)
    written = json.loads(json.dumps(strategy.normal().model_dump(mode="json")))
    assert parse_strategy(written).normal() == strategy.normal()
    assert parse_strategy(written).hash() == strategy.hash()


@given(documents(), documents())
def test_hashes_are_equal_just_when_meanings_are(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = parse_strategy(one), parse_strategy(other)
    assert (a.hash() == b.hash()) == (a.normal() == b.normal())


@given(documents())
def test_the_order_of_keys_has_no_meaning(document: dict[str, Any]) -> None:
    assert parse_strategy(reverse(document)).hash() == parse_strategy(document).hash()


@pytest.mark.parametrize(
    "one, other",
    [
        ({}, {"engine": "fsdp2", "wrap": "block", "reshard_after_forward": True}),
        ({"wrap": "root"}, {"wrap": "root", "reshard_after_forward": False}),
        ({"engine": "ddp"}, {"engine": "ddp", "bucket_mb": 25.0}),
        ({}, {"prefetch": 0}),
        ({}, {"sharding": "full_shard", "placement": "dim0", "param_dtype": "auto"}),
        ({"sharding": "shard_grad_op"}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": 1}, {"reshard_after_forward": False}),
        ({"prefetch": 2, "async_unshard": True}, {"prefetch": 2, "prefetch_backward": 2}),
        (
            {"engine": "fsdp1"},
            {"engine": "fsdp1", "prefetch_backward": 1, "use_orig_params": False},
        ),
        ({}, {"overrides": [{"layers": "0-3", "reshard_after_forward": True}]}),
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
        (
            {"engine": "slide", "grad_sync": "gpu_reduce"},
            {"engine": "slide", "grad_sync": "gpu_reduce", "reduce_every_micro_batch": True},
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


def test_the_hash_of_the_default_stays() -> None:
    """Trials are stored under these hashes: another value throws every stored trial away."""
    assert Strategy().hash() == "f7347c949a942822"


@given(documents(), documents())
def test_briefs_are_equal_just_when_meanings_are(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = parse_strategy(one), parse_strategy(other)
    assert (a.brief() == b.brief()) == (a.hash() == b.hash())
    assert a.brief() == a.normal().brief()


def test_the_brief_names_what_is_not_the_default() -> None:
    gradients = {
        "codec": "int4:group=64,levels=nf4",
        "error_feedback": True,
        "residual": "bf16",
        "minimum_size": 0,
        "exclude": ["*.bias", "*norm*"],
        "warmup_steps": 20,
    }
    weights = {"codec": "int8", "minimum_size": 4096}
    assert parse_strategy({"gradients": gradients, "weights": weights}).brief() == (
        "fsdp2, int4:group=64,levels=nf4 from 0 elements, error feedback in bf16, "
        "without *.bias *norm*, after 20 steps, weights int8:group=128 from 4096 elements"
    )
    nodes = {"codec": "int8", "between_nodes": "int4", "ranks_per_node": 4}
    assert parse_strategy({"gradients": nodes}).brief() == (
        "fsdp2, int8:group=128, int4:group=128 between nodes of 4 ranks"
    )


@pytest.mark.parametrize(
    "document, message",
    [
        ({"engin": "ddp"}, "strategy.engin: unknown key; did you mean 'engine'?"),
        (
            {"engine": "dpp"},
            "strategy.engine: input should be 'ddp', 'fsdp1', 'fsdp2', 'manual' or 'slide' (found "
            "'dpp')",
        ),
        (
            {"engine": "ddp", "wrap": "root"},
            "strategy: wrap has no meaning for engine 'ddp': remove it",
        ),
        (
            {"sharding": "hybrid_shard"},
            "strategy: hybrid_shard and replicas belong together: give both or none",
        ),
        (
            {"sharding": "no_shard", "prefetch": 1},
            "strategy: prefetch is pointless with no_shard, which gathers nothing: remove it",
        ),
        (
            {"sharding": "shard_grad_op", "reshard_after_forward": 4},
            "strategy: shard_grad_op keeps parameters after forward: remove reshard_after_forward",
        ),
        (
            {"engine": "fsdp1", "wrap_size": 2},
            "strategy: fsdp1 cannot make one unit of several blocks: use wrap: size, or "
            "engine: fsdp2",
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
            "strategy: overrides: layers: with wrap: root no unit is theirs: use block",
        ),
        (
            {"activations": "disk"},
            "strategy: activations: disk is for inputs of checkpointed blocks: set "
            "activation_checkpointing: full, or remove it",
        ),
        (
            {"activations": "disk", "activation_checkpointing": "full", "compile": True},
            "strategy: activations: disk does not reach into compiled blocks: remove it, or "
            "compile",
        ),
        (
            {"gradients": {"error_feedback": True}},
            "strategy.gradients: error_feedback is pointless with codec 'none': nothing is lost",
        ),
        (
            {"gradients": {"codec": "int8", "route": "native"}},
            "strategy.gradients: codec 'int8' cannot be summed on the wire: use route: exchange",
        ),
        (
            {"gradients": {"codec": "itn8"}},
            "strategy.gradients.codec: unknown codec 'itn8'; did you mean 'int8'? (found 'itn8')",
        ),
        (
            {"gradients": {"codec": "int8:gruop=8"}},
            "strategy.gradients.codec.gruop: unknown key; did you mean 'group'?",
        ),
        (
            {"gradients": {"codec": "topk:density=2.0"}},
            "strategy.gradients.codec.density: input should be less than or equal to 1 (found 2.0)",
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
            "accumulation: 3 micro-batches do not divide the 8 samples of a rank "
            "(train.batch_size * train.accumulation)",
        ),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_fits(parse_strategy(document), world_size=4, samples=8)
    assert str(refusal.value) == message


def test_every_setting_is_in_the_document_of_strategies() -> None:
    text = (Path(__file__).parents[2] / "docs/strategies.md").read_text()
    fields = {*Strategy.model_fields, *Override.model_fields} - {"engine"}
    assert [field for field in sorted(fields) if f"`{field}`" not in text] == []
