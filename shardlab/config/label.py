"""Labels: a strategy in a few words."""

from shardlab.config.compression import gradient_words, weight_words
from shardlab.config.settings import Override, Settings, ranges

_WHERE = {"memory": "in memory", "disk": "on disk"}


def label(canonical: Settings) -> str:
    """Return the label of a canonical form; see `Strategy.label`."""
    words = [canonical.engine, *gradient_words(canonical.gradients)]
    if canonical.weights is not None:
        words.append(weight_words(canonical.weights))
    words += [*_sharding(canonical), *_prefetch(canonical), *_computation(canonical)]
    return ", ".join([*words, *map(override_words, canonical.overrides)])


def _sharding(canonical: Settings) -> list[str]:
    words = []
    if _is_set(canonical, "bucket_mb"):
        words.append(f"buckets of {repr(canonical.bucket_mb).removesuffix('.0')} MiB")
    if canonical.sharding == "no_shard":
        words.append("nothing sharded")
    if canonical.replicas is not None:
        words.append(f"{canonical.replicas} replicas")
    if canonical.wrap == "root":
        words.append("one unit")
    elif canonical.wrap_size is not None:
        kind = "blocks" if canonical.wrap == "block" else "elements"
        words.append(f"units of {canonical.wrap_size} {kind}")
    words += _streaming(canonical)
    if canonical.wrap != "root" and canonical.reshard_after_forward is not True:
        words += _kept(canonical.reshard_after_forward)
    if _is_set(canonical, "placement"):
        words.append(f"sharded on {canonical.placement}")
    return words


def _is_set(canonical: Settings, key: str) -> bool:
    """Return whether the engine has a setting, with a value that is not its default."""
    return bool(getattr(canonical, key) != canonical.traits.defaults.get(key))


def _streaming(canonical: Settings) -> list[str]:
    words = [f"window of {canonical.window}"] if _is_set(canonical, "window") else []
    if canonical.param_transfer == "shard":
        words.append("parts gathered")
    if canonical.grad_sync == "gpu_reduce":
        words.append("reduced on the device")
    if canonical.moment_dtype != "fp32":
        words.append(f"moments in {canonical.moment_dtype}")
    return words


def _kept(reshard: bool | int | None) -> list[str]:
    """Return where parameters are after forward."""
    if reshard is None:
        return []
    if isinstance(reshard, bool):
        return ["freed after forward" if reshard else "kept after forward"]
    return [f"over {reshard} ranks after forward"]


def _prefetch(canonical: Settings) -> list[str]:
    words = []
    if canonical.prefetch not in (None, canonical.default_prefetch()):
        words.append(f"{canonical.prefetch} units ahead")
    if canonical.prefetch_backward is not None:
        words.append(f"{canonical.prefetch_backward} ahead in backward")
    if canonical.async_unshard is not None:
        words.append("asynchronous unshard" if canonical.async_unshard else "synchronous unshard")
    if canonical.limit_all_gathers is False:
        words.append("gathers without limit")
    if canonical.use_orig_params:
        words.append("original parameters")
    return words


def _computation(canonical: Settings) -> list[str]:
    words = []
    if canonical.param_dtype != "auto":
        words.append(f"computed in {canonical.param_dtype}")
    if canonical.reduce_dtype != "fp32":
        words.append(f"reduced in {canonical.reduce_dtype}")
    if canonical.output_dtype is not None:
        words.append(f"output in {canonical.output_dtype}")
    if canonical.activation_checkpointing != "none":
        words.append(f"{canonical.activation_checkpointing} checkpointing")
    if canonical.activations != "device":
        words.append(f"activations {_WHERE[canonical.activations]}")
    if canonical.compile:
        words.append("compiled")
    if canonical.accumulation is not None:
        words.append(f"{canonical.accumulation} micro-batches")
    if canonical.reduce_every_micro_batch:
        words.append("each reduced")
    if canonical.offload:
        words.append("off-loaded")
    return words


def override_words(override: Override) -> str:
    """Return an override in words, such as `layers 0-2 kept after forward`."""
    words = _kept(override.reshard_after_forward)
    if override.param_dtype is not None:
        words.append(f"in {override.param_dtype}")
    if override.activation_checkpointing is not None:
        words.append(f"{override.activation_checkpointing} checkpointing")
    where = override.module or f"layers {ranges(override.layers or ())}"
    return f"{where} {' '.join(words) or 'a unit'}"
