"""Strategies as users may write them, to be drawn by hypothesis."""

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES, inapplicable

CODECS = ["none", "bf16", "int8", {"name": "int8", "group": 64}, "topk:density=0.1"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"error_feedback": True},
    {"error_feedback": True, "residual": "bf16"},
    {"route": "exchange"},
    {"route": "native"},
    {"minimum_size": 7, "exclude": ["*.bias", "*norm*"], "warmup_steps": 2},
    {"between_nodes": "int8", "ranks_per_node": 4},
    {"between_nodes": "none"},
]
DTYPES = ["auto", "fp32", "bf16"]
VALUES: dict[str, list[Any]] = {
    "gradients": [{"codec": codec, **options} for codec in CODECS for options in OPTIONS],
    "weights": [None, {}, {"codec": "int8"}, {"codec": "bf16", "minimum_size": 9}],
    "param_dtype": DTYPES,
    "reduce_dtype": ["fp32", "bf16"],
    "output_dtype": [None, "fp32", "bf16"],
    "moment_dtype": ["fp32", "bf16"],
    "moments": [None, "memory", "disk"],
    "activation_checkpointing": ["none", "selective", "full"],
    "activations": ["device", "memory", "disk"],
    "compile": [False, True],
    "accumulation": [None, 1, 4],
    "wrap": [None, "block", "root", "size"],
    "wrap_size": [None, 1, 3],
    "sharding": [None, "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"],
    "replicas": [None, 2],
    "reshard_after_forward": [None, True, False, 1, 2],
    "prefetch": [None, 0, 1, 3],
    "prefetch_backward": [None, 0, 1, 3],
    "bucket_mb": [None, 0.1, 25.0],
    "limit_all_gathers": [None, False, True],
    "use_orig_params": [None, False, True],
    "offload": [False, True],
    "placement": [None, "dim0", "dim1", "largest"],
    "async_unshard": [None, False, True],
    "window": [None, 2, 4],
    "param_transfer": [None, "full", "shard"],
    "grad_sync": [None, "cpu_reduce", "gpu_reduce"],
}
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "reshard_after_forward": st.booleans(),
        "param_dtype": st.sampled_from(DTYPES),
        "activation_checkpointing": st.sampled_from(["none", "full"]),
    },
)
WHERE = st.sampled_from([{"layers": n} for n in (0, [3, 1], "0-2", "1,3-5")] + [{"module": "head"}])


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Strategies as a user may write them, with any part left out."""
    engine = draw(st.sampled_from([*ENGINES]))
    # few settings at a time: most combinations of many are refused
    settings = sorted(VALUES.keys() - inapplicable(engine))
    keys = draw(st.lists(st.sampled_from(settings), max_size=3, unique=True))
    document = {"engine": engine} | {key: draw(st.sampled_from(VALUES[key])) for key in keys}
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(WHERE, OVERRIDES), max_size=3))
        document["overrides"] = [where | settings for where, settings in pairs]
    try:
        parse_strategy(document)
    except UserError:
        assume(False)
    return document
