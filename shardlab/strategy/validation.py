"""Validation of a strategy: combinations of settings, and what a number of ranks can do.

A combination is refused where an engine cannot do it, where torch would silently do something else,
or where it changes nothing. Each rule yields the setting, the reason and the fix.
"""

from collections.abc import Iterator

from shardlab.core.errors import UserError
from shardlab.strategy.engine_traits import accepts_codec, engines_with, inapplicable
from shardlab.strategy.settings import SETTINGS, Settings, canonical_overrides


def check(strategy: Settings) -> None:
    """Refuse what is invalid on any number of ranks.

    Raises:
        ValueError: the setting, the reason and the fix.
    """
    for reason in (
        *_inapplicable(strategy),
        *_sharding(strategy),
        *_units(strategy),
        *_overrides(strategy),
        *_activations(strategy),
        *_numbers(strategy),
        *_flat(strategy),
        *_streaming(strategy),
        *_replicas(strategy),
    ):
        raise ValueError(reason)


def check_fits(strategy: Settings, world_size: int, samples: int | None = None) -> None:
    """Refuse what this number of ranks cannot do.

    Args:
        samples: number of samples that one rank sees in a step.

    Raises:
        UserError: the setting, the reason and the fix.
    """
    for reason in _unfit(strategy, world_size, samples):
        raise UserError(reason)


def check_optimizer(strategy: Settings, optimizer: str) -> None:
    """Refuse Muon on engines whose ranks keep parts of matrices.

    Args:
        optimizer: `train.optimizer`.

    Raises:
        UserError: with the fix.
    """
    if optimizer == "muon" and strategy.engine != "ddp":
        raise UserError(
            f"train.optimizer: muon needs whole matrices, of which ranks of {strategy.engine} keep "
            "parts: set engine: ddp, or optimizer: adamw"
        )


def _inapplicable(strategy: Settings) -> Iterator[str]:
    others = inapplicable(strategy.engine)
    for key, field in type(strategy).model_fields.items():
        if key in others and getattr(strategy, key) != field.default:
            fix = "remove it"
            if key == "reduce_dtype":
                fix += ", or cast gradients by `gradients: {codec: bf16}`"
            if key == "sync":
                fix += f", or take {engines_with(key)}, whose copies can train alone"
            yield f"{key} does not apply to engine {strategy.engine!r}: {fix}"


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
        if strategy.offload:
            yield "offload needs shards: remove it, or sharding: no_shard"
    if type(reshard) is int and not strategy.traits.subgroup_reshard:
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
    traits = strategy.traits
    # where the engine prefetches in backward by default it does so for one unit, too
    if wrap == "root" and any(strategy.depths()) and traits.prefetch_backward is None:
        yield "prefetch is pointless with wrap: root, where there is one unit: remove it"
    if not traits.multi_block_units and wrap in (None, "block") and (size or 1) > 1:
        yield (
            f"{strategy.engine} cannot make one unit of several blocks: use wrap: size, or engine: "
            "fsdp2"
        )
    if traits.max_prefetch is not None and max(strategy.depths()) > traits.max_prefetch:
        yield f"{strategy.engine} gathers at most {traits.max_prefetch} unit ahead: lower prefetch"


def _overrides(strategy: Settings) -> Iterator[str]:
    one_block_each = strategy.wrap in (None, "block")
    for override in strategy.overrides:
        of_units = override.module or set(override.settings()) - {"activation_checkpointing"}
        where = override.module or "layers"
        if of_units and not strategy.traits.unit_overrides:
            yield f"overrides: {where}: {strategy.engine} has one setting for all units: remove it"
        if of_units and not one_block_each:
            yield (
                f"overrides: {where}: with wrap: {strategy.wrap} units are not single blocks: use "
                "wrap: block"
            )
        reshard = override.reshard_after_forward
        if reshard is not None and strategy.sharding == "no_shard":
            yield "overrides: reshard_after_forward is pointless with no_shard: remove it"
        if type(reshard) is int and not strategy.traits.subgroup_reshard:
            yield "overrides: reshard_after_forward as a number of ranks is for fsdp2"


def _activations(strategy: Settings) -> Iterator[str]:
    where = strategy.activations
    if where == "device":
        return
    base = {key: getattr(strategy, key) for key in SETTINGS}
    # an override may be overridden itself
    overrides = canonical_overrides(strategy.overrides, base)
    modes = {override.activation_checkpointing for override in overrides}
    if modes | {strategy.activation_checkpointing} <= {None, "none"}:
        yield (
            f"activations: {where} is for inputs of checkpointed blocks: set "
            "activation_checkpointing: full, or remove it"
        )
    if strategy.compile:
        yield f"activations: {where} cannot store what compiled blocks keep: remove it, or compile"


def _numbers(strategy: Settings) -> Iterator[str]:
    dtypes = [strategy.param_dtype, *(override.param_dtype for override in strategy.overrides)]
    if strategy.gradients.error_feedback and "fp16" in dtypes:
        yield (
            "error_feedback keeps what was not sent in units of the loss scale, which changes with "
            "param_dtype: fp16: use bf16"
        )
    if strategy.reduce_dtype != "fp32" and not strategy.gradients.plain():
        yield (
            f"reduce_dtype: {strategy.reduce_dtype} rounds what the codec rounds again: remove it, "
            "or gradients"
        )


def _flat(strategy: Settings) -> Iterator[str]:
    codec = strategy.gradients.codec.name
    if not accepts_codec(strategy.engine, codec):
        yield (
            f"{codec} factors matrices, and {strategy.engine} sends flat vectors, which it would "
            "leave as they are: use fsdp2 or ddp, or another codec"
        )


def _streaming(strategy: Settings) -> Iterator[str]:
    if strategy.compile and not strategy.traits.compiles:
        yield (
            "compile needs parameters whose storage does not change: remove it, or engine: "
            f"{strategy.engine}"
        )
    if strategy.traits.residency != "streamed":
        return
    if strategy.wrap == "root":
        yield "wrap: root is one unit, and a window needs several: use block, or another engine"
    if strategy.grad_sync != "gpu_reduce" and strategy.reduce_dtype != "fp32":
        yield "cpu_reduce sums gradients in float32: remove reduce_dtype, or use gpu_reduce"
    if strategy.gradients.between_nodes is not None:
        yield (
            f"{strategy.engine} uses one codec inside nodes and between them: remove "
            "gradients.between_nodes"
        )
    if strategy.weights is not None and strategy.param_transfer != "shard":
        yield "weights: nothing is gathered: remove it, or use param_transfer: shard"


def _replicas(strategy: Settings) -> Iterator[str]:
    sync, gradients = strategy.sync, strategy.gradients
    if sync is None:
        return
    replicated = strategy.traits.residency == "replicated" or strategy.sharding == "no_shard"
    if not replicated and strategy.replicas is None:
        yield (
            "sync is between copies of the model: set sharding: no_shard, or hybrid_shard with "
            "replicas"
        )
    is_unused = not gradients.plain() if replicated else gradients.between_nodes is not None
    if is_unused and not sync.warmup_steps:
        yield (
            "no gradients are sent between copies of the model: give the codec to sync, or set its "
            "warmup_steps"
        )


def _unfit(strategy: Settings, world_size: int, samples: int | None) -> Iterator[str]:
    replicas, reshard = strategy.replicas or 1, strategy.reshard_after_forward
    if world_size % replicas:
        yield f"replicas: {replicas} copies do not divide {world_size} ranks"
    elif replicas == world_size > 1:
        yield f"replicas: {replicas} copies on as many ranks shard nothing: use no_shard"
    shards = world_size // replicas
    numbers = [reshard, *(override.reshard_after_forward for override in strategy.overrides)]
    for number in numbers:
        if type(number) is int and shards % number:
            yield f"reshard_after_forward: {number} does not divide the {shards} ranks of a copy"
    if samples is not None and strategy.accumulation and samples % strategy.accumulation:
        yield (
            f"accumulation: {strategy.accumulation} micro-batches do not divide the {samples} "
            "samples that a rank has in a step"
        )
