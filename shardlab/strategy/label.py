"""A strategy in a few words."""

from shardlab.strategy.compression import gradient_words, weight_words
from shardlab.strategy.overrides import Override, ranges
from shardlab.strategy.settings import Settings

_WHERE = {"memory": "in memory", "disk": "on disk"}


def brief(normal: Settings) -> str:
    """See `Strategy.brief`; of a normal form."""
    words = [normal.engine, *gradient_words(normal.gradients)]
    if normal.weights is not None:
        words.append(weight_words(normal.weights))
    words += [*_sharding(normal), *_prefetch(normal), *_computation(normal)]
    return ", ".join([*words, *map(override_words, normal.overrides)])


def _sharding(normal: Settings) -> list[str]:
    words = []
    if normal.engine == "ddp" and normal.bucket_mb != 25:
        words.append(f"buckets of {repr(normal.bucket_mb).removesuffix('.0')} MiB")
    if normal.sharding == "no_shard":
        words.append("nothing sharded")
    if normal.replicas is not None:
        words.append(f"{normal.replicas} replicas")
    if normal.wrap == "root":
        words.append("one unit")
    elif normal.wrap_size is not None:
        kind = "blocks" if normal.wrap == "block" else "elements"
        words.append(f"units of {normal.wrap_size} {kind}")
    if normal.engine == "slide":
        return words + _sliding(normal)
    if normal.wrap != "root" and normal.reshard_after_forward is not True:
        words += _kept(normal.reshard_after_forward)
    if normal.placement not in (None, "dim0"):
        words.append(f"sharded on {normal.placement}")
    return words


def _sliding(normal: Settings) -> list[str]:
    words = [] if normal.window == 2 else [f"window of {normal.window}"]
    if normal.param_transfer == "shard":
        words.append("parts gathered")
    if normal.grad_sync == "gpu_reduce":
        words.append("reduced on the device")
    if normal.moments != "memory":
        words.append(f"moments {_WHERE[normal.moments]}")
    if normal.moment_dtype != "fp32":
        words.append(f"moments in {normal.moment_dtype}")
    return words


def _kept(reshard: bool | int | None) -> list[str]:
    """Where parameters are after forward."""
    if reshard is None:
        return []
    if isinstance(reshard, bool):
        return ["freed after forward" if reshard else "kept after forward"]
    return [f"over {reshard} ranks after forward"]


def _prefetch(normal: Settings) -> list[str]:
    words = []
    default = normal.model_copy(update={"prefetch": None}).depths()[0]
    if normal.prefetch not in (None, default):
        words.append(f"{normal.prefetch} units ahead")
    if normal.prefetch_backward is not None:
        words.append(f"{normal.prefetch_backward} ahead in backward")
    if normal.async_unshard is not None:
        words.append("asynchronous unshard" if normal.async_unshard else "synchronous unshard")
    if normal.limit_all_gathers is False:
        words.append("gathers without limit")
    if normal.use_orig_params:
        words.append("original parameters")
    return words


def _computation(normal: Settings) -> list[str]:
    words = []
    if normal.param_dtype != "auto":
        words.append(f"computed in {normal.param_dtype}")
    if normal.reduce_dtype != "fp32":
        words.append(f"reduced in {normal.reduce_dtype}")
    if normal.output_dtype is not None:
        words.append(f"output in {normal.output_dtype}")
    if normal.activation_checkpointing != "none":
        words.append(f"{normal.activation_checkpointing} checkpointing")
    if normal.activations != "device":
        words.append(f"activations {_WHERE[normal.activations]}")
    if normal.compile:
        words.append("compiled")
    if normal.accumulation is not None:
        words.append(f"{normal.accumulation} micro-batches")
    if normal.reduce_every_micro_batch and normal.grad_sync != "gpu_reduce":
        words.append("each reduced")
    if normal.offload:
        words.append("off-loaded")
    return words


def override_words(override: Override) -> str:
    """`layers 0-2 kept after forward`."""
    words = _kept(override.reshard_after_forward)
    if override.param_dtype is not None:
        words.append(f"in {override.param_dtype}")
    if override.activation_checkpointing is not None:
        words.append(f"{override.activation_checkpointing} checkpointing")
    where = override.module or f"layers {ranges(override.layers or ())}"
    return f"{where} {' '.join(words) or 'a unit'}"
