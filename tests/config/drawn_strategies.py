"""Strategies as users may write them, to be drawn by hypothesis."""

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from shardlab.config.strategy import parse_strategy
from shardlab.core.errors import UserError

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
        "weights": st.none() | WEIGHTS,
        "moment_dtype": st.sampled_from(["fp32", "bf16"]),
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
