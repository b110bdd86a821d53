"""Which settings of a strategy go together, and which fit a number of ranks; reasons for the rest.

A combination is refused when an engine cannot do it, when torch would do something else in silence,
or when it changes nothing.
"""

from collections.abc import Iterator

from shardlab.core.errors import UserError
from shardlab.strategy.codec_table import find
from shardlab.strategy.settings import Settings

_UNITS = ("sharding", "replicas", "wrap", "wrap_size", "reshard_after_forward")
_AHEAD = ("prefetch", "prefetch_backward")
_OF_SHARDED = (*_UNITS, *_AHEAD, "reduce_dtype", "reduce_every_micro_batch", "weights")
_OF_ONE = {
    "ddp": ("bucket_mb",),
    "fsdp1": (*_OF_SHARDED, "limit_all_gathers", "use_orig_params", "offload"),
    "fsdp2": (*_OF_SHARDED, "placement", "async_unshard", "output_dtype", "offload"),
    "manual": _OF_SHARDED,
    "slide": (
        *("wrap", "wrap_size", "window", "param_transfer", "grad_sync"),
        *("reduce_dtype", "reduce_every_micro_batch", "weights", "moments", "moment_dtype"),
    ),
}
"""settings that not all engines have"""


def check(strategy: Settings) -> None:
    """Refuses what has no meaning on any number of ranks.

    Raises:
        ValueError: the setting, the reason and the fix.
    """
    for reason in (
        *_foreign(strategy),
        *_sharding(strategy),
        *_units(strategy),
        *_overrides(strategy),
        *_activations(strategy),
        *_numbers(strategy),
        *_flat(strategy),
        *_sliding(strategy),
    ):
        raise ValueError(reason)


def check_fits(strategy: Settings, world_size: int, samples: int | None = None) -> None:
    """Refuses what this many ranks cannot do.

    Args:
        samples: that one rank sees in a step.

    Raises:
        UserError: the setting, the reason and the fix.
    """
    for reason in _unfit(strategy, world_size, samples):
        raise UserError(reason)


def foreign(engine: str) -> frozenset[str]:
    """Settings that other engines have."""
    return frozenset(key for keys in _OF_ONE.values() for key in keys) - {*_OF_ONE[engine]}


def _foreign(strategy: Settings) -> Iterator[str]:
    fields = type(strategy).model_fields
    for key in (key for key in fields if key in foreign(strategy.engine)):
        if getattr(strategy, key) != fields[key].default:
            hint = ""
            if key == "reduce_dtype":
                hint = ", whose gradients are cast by `gradients: {codec: bf16}`"
            yield f"{key} has no meaning for engine {strategy.engine!r}{hint}: remove it"


def _sharding(strategy: Settings) -> Iterator[str]:
    sharding, reshard = strategy.sharding, strategy.reshard_after_forward
    if (sharding == "hybrid_shard") != (strategy.replicas is not None):
        yield "hybrid_shard and replicas belong together: give both or none"
    if sharding == "shard_grad_op" and reshard not in (None, False):
        yield "shard_grad_op keeps parameters after forward: remove reshard_after_forward"
    if sharding == "no_shard":
        for key in ("reshard_after_forward", "weights", "prefetch", "prefetch_backward"):
            if getattr(strategy, key):
                yield f"{key} is pointless with no_shard, which gathers nothing: remove it"
        if strategy.reduce_every_micro_batch:
            yield "reduce_every_micro_batch is pointless with no_shard: there are no shards"
        if strategy.offload:
            yield "offload needs shards: remove it, or sharding: no_shard"
    if strategy.engine != "fsdp2" and reshard is not None and not isinstance(reshard, bool):
        yield "reshard_after_forward as a number of ranks is for fsdp2: use true or false"


def _units(strategy: Settings) -> Iterator[str]:
    wrap, size = strategy.wrap, strategy.wrap_size
    if wrap == "size" and size is None:
        yield "wrap: size needs wrap_size, the elements of a unit"
    if wrap == "root" and size is not None:
        yield "wrap_size is pointless with wrap: root: remove it"
    if wrap == "root" and strategy.reshard_after_forward:
        yield (
            "reshard_after_forward: true is pointless with wrap: root, where backward follows "
            "forward at once: remove one of them"
        )
    if wrap == "root" and any(strategy.depths()) and strategy.engine != "fsdp1":
        yield "prefetch is pointless with wrap: root, where there is one unit: remove it"
    if strategy.engine == "fsdp1":
        if wrap in (None, "block") and (size or 1) > 1:
            yield "fsdp1 cannot make one unit of several blocks: use wrap: size, or engine: fsdp2"
        if max(strategy.depths()) > 1:
            yield "fsdp1 gathers at most 1 unit ahead: lower prefetch"


def _overrides(strategy: Settings) -> Iterator[str]:
    one_block_each = strategy.wrap in (None, "block")
    for override in strategy.overrides:
        of_units = override.module or set(override.settings()) - {"activation_checkpointing"}
        where = override.module or "layers"
        if of_units and strategy.engine in ("ddp", "fsdp1", "slide"):
            yield f"overrides: {where}: {strategy.engine} has one setting for all units: remove it"
        if of_units and not one_block_each:
            yield f"overrides: {where}: with wrap: {strategy.wrap} no unit is theirs: use block"
        reshard = override.reshard_after_forward
        if reshard is not None and strategy.sharding == "no_shard":
            yield "overrides: reshard_after_forward is pointless with no_shard: remove it"
        if strategy.engine == "manual" and type(reshard) is int:
            yield "overrides: reshard_after_forward as a number of ranks is for fsdp2"


def _activations(strategy: Settings) -> Iterator[str]:
    where = strategy.activations
    if where == "device":
        return
    modes = {each.activation_checkpointing for each in strategy.overrides}
    if modes | {strategy.activation_checkpointing} <= {None, "none"}:
        yield (
            f"activations: {where} is for inputs of checkpointed blocks: set "
            "activation_checkpointing: full, or remove it"
        )
    if strategy.compile:
        yield f"activations: {where} does not reach into compiled blocks: remove it, or compile"


def _numbers(strategy: Settings) -> Iterator[str]:
    dtypes = [strategy.param_dtype, *(each.param_dtype for each in strategy.overrides)]
    if strategy.gradients.error_feedback and "fp16" in dtypes:
        yield (
            "error_feedback keeps what was not sent in units of the loss scale, which changes with "
            "param_dtype: fp16: use bf16"
        )
    if strategy.reduce_dtype != "fp32" and not strategy.gradients.plain():
        yield f"codecs take float32: remove reduce_dtype: {strategy.reduce_dtype}, or gradients"
    narrow = [dtype for dtype in dtypes if dtype in ("bf16", "fp16")]
    if narrow and strategy.weights is not None and strategy.weights.canonical():
        yield f"codecs take float32: remove param_dtype: {narrow[0]}, or weights"
    if strategy.reduce_every_micro_batch and strategy.accumulation == 1:
        yield "reduce_every_micro_batch is pointless with accumulation: 1: remove it"


def takes(engine: str, codec: str) -> bool:
    """Return whether the codec of this name compresses anything of the gradients of the engine."""
    spec = find(codec)
    flat = engine in ("fsdp1", "manual", "slide")
    return not (flat and spec is not None and spec.needs_matrices)


def _flat(strategy: Settings) -> Iterator[str]:
    codec = strategy.gradients.codec.name
    if not takes(strategy.engine, codec):
        yield (
            f"{codec} factors matrices, and {strategy.engine} sends flat vectors, which it would "
            "leave as they are: use fsdp2 or ddp, or another codec"
        )


def _sliding(strategy: Settings) -> Iterator[str]:
    if strategy.engine != "slide":
        return
    if strategy.wrap == "root":
        yield "wrap: root is one unit, over which nothing slides: use block, or another engine"
    if strategy.compile:
        yield "compile needs parameters that stay where they are: remove it, or engine: slide"
    if strategy.grad_sync != "gpu_reduce" and strategy.reduce_dtype != "fp32":
        yield "cpu_reduce sums gradients in float32: remove reduce_dtype, or use gpu_reduce"
    if strategy.gradients.between_nodes is not None:
        yield "slide takes the same codec between nodes: remove gradients.between_nodes"
    if strategy.weights is not None and strategy.param_transfer != "shard":
        yield "weights: nothing is gathered: remove it, or use param_transfer: shard"


def _unfit(strategy: Settings, world_size: int, samples: int | None) -> Iterator[str]:
    replicas, reshard = strategy.replicas or 1, strategy.reshard_after_forward
    if world_size % replicas:
        yield f"replicas: {replicas} copies do not divide {world_size} ranks"
    elif replicas == world_size > 1:
        yield f"replicas: {replicas} copies on as many ranks shard nothing: use no_shard"
    shards = world_size // replicas
    numbers = [reshard, *(each.reshard_after_forward for each in strategy.overrides)]
    for number in numbers:
        if type(number) is int and shards % number:
            yield f"reshard_after_forward: {number} does not divide the {shards} ranks of a copy"
    if samples is not None and strategy.accumulation and samples % strategy.accumulation:
        yield (
            f"accumulation: {strategy.accumulation} micro-batches do not divide the {samples} "
            "samples of a rank (train.batch_size * train.accumulation)"
        )
