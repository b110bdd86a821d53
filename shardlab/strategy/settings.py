"""Every setting of a strategy, of the whole model and of single layers (overrides).

The docstring of each has its meaning and the engines that have it.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.ranges import format_ranges, parse_ranges
from shardlab.strategy.compression import Compression, Gradients, Weights
from shardlab.strategy.engine_traits import ENGINES, EngineName, EngineTraits
from shardlab.strategy.sync import Sync

DType = Literal["auto", "fp32", "bf16", "fp16"]
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Checkpointing = Literal["none", "selective", "full"]

Reshard = Annotated[
    bool | Annotated[int, Field(ge=1)],
    # over groups of one rank every parameter is whole
    AfterValidator(lambda value: False if value is not True and value == 1 else value),
]

_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
    ]
}


def _numbers(value: Any) -> Any:
    """Return `"0-2,7"`, `7` or `[0, "1-2", 7]` as sorted numbers without repetition."""
    if isinstance(value, list | tuple):
        return tuple(sorted({number for item in value for number in _numbers(item)}))
    try:
        return parse_ranges(str(value))
    except ValueError:
        expected = "expected layers such as 3, '0-3' or '0-2,7'"
        raise PydanticCustomError("layers", expected) from None


class Override(Document):
    """Settings for some layers, or for one of the two modules around them."""

    layers: (
        Annotated[tuple[int, ...], BeforeValidator(_numbers), WithJsonSchema(_SCHEMA)] | None
    ) = Field(None, min_length=1)
    """numbers of transformer blocks from 0, as in `0-3`, `7` or `[0, 7]`"""
    module: Literal["embedding", "head"] | None = None
    """fsdp2, manual: the token embedding or the output head becomes a unit; where they share their
    weight they become one unit"""
    reshard_after_forward: Reshard | None = None
    """in place of the setting of the strategy"""
    param_dtype: DType | None = None
    """in place of the setting of the strategy"""
    activation_checkpointing: Checkpointing | None = None
    """in place of the setting of the strategy"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.layers is None) == (self.module is None):
            raise ValueError("give either layers or module")
        if self.layers is not None and not self.settings():
            raise ValueError(f"nothing is set for layers {format_ranges(self.layers)}: remove it")
        if self.module is not None and self.activation_checkpointing is not None:
            raise ValueError("activation_checkpointing is for layers: remove it")
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that are given."""
        values = {key: getattr(self, key) for key in SETTINGS}
        return {key: value for key, value in values.items() if value is not None}


SETTINGS = ("reshard_after_forward", "param_dtype", "activation_checkpointing")

Overrides = Annotated[tuple[Override, ...], AS_TUPLE]


class Settings(Document):
    """Everything that can be tuned, setting by setting; `Strategy` validates combinations."""

    engine: EngineName = "fsdp2"
    """what wraps the model and computes a step"""
    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] | None = None
    """full_shard: every rank keeps 1/W of parameters, gradients and optimizer states (default);
    shard_grad_op: gathered parameters stay until backward; no_shard: nothing is sharded;
    hybrid_shard: several copies of the model, each sharded over neighbouring ranks"""
    replicas: int | None = Field(None, ge=2)
    """hybrid_shard: number of copies"""
    wrap: Literal["block", "size", "root"] | None = None
    """the unit that is gathered and reduced in one collective. block: `wrap_size` transformer
    blocks; size: blocks with at least `wrap_size` elements; root: the whole model"""
    wrap_size: int | None = Field(None, ge=1)
    """number of blocks (default 1) or of elements of a unit"""
    reshard_after_forward: Reshard | None = None
    """free gathered parameters after forward (default) or keep them for backward. fsdp2: a number
    keeps them sharded over groups of that many ranks"""
    placement: Literal["dim0", "dim1", "largest"] | None = None
    """fsdp2: dimension on which a parameter is sharded (default dim0); dim1 and largest apply where
    that dimension splits evenly"""
    overrides: Overrides = ()
    """other settings for some layers; later overrides win"""
    prefetch: int | None = Field(None, ge=0)
    """number of units gathered ahead in forward (default: 1 for manual, else 0)"""
    prefetch_backward: int | None = Field(None, ge=0)
    """number of units gathered ahead in backward (default: as `prefetch`; fsdp1: 1)"""
    async_unshard: bool | None = None
    """fsdp2: all-gathers are asynchronous; without streams, as on a CPU, they and reduce-scatters
    overlap with computation (default: there, with prefetch)"""
    limit_all_gathers: bool | None = None
    """fsdp1: the host waits where all-gathers would run too far ahead (default)"""
    use_orig_params: bool | None = None
    """fsdp1: the optimizer sees parts of parameters instead of one flat vector per unit"""
    bucket_mb: float | None = Field(None, gt=0)
    """ddp: size of a gradient bucket in MiB (default 25)"""
    param_dtype: DType = "auto"
    """type of computation and of gathered parameters; the optimizer updates float32. auto: bf16 or
    fp16 where the device has fast products for it, else fp32. fp16 scales the loss; ddp computes
    by autocast"""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fsdp1, fsdp2, manual, and slide with gpu_reduce: type in which gradients are reduced"""
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """fsdp2: type of the model's output (default: as computed)"""
    activation_checkpointing: Checkpointing = "none"
    """what backward recomputes of each block: nothing, all but its matrix products, or all"""
    activations: Literal["device", "memory", "disk"] = "device"
    """storage of activations (with checkpointing: the inputs of blocks) until backward: the device
    that computes, host memory, or files in .work/activations or in the folder that the environment
    variable SHARDLAB_ACTIVATIONS names"""
    compile: bool = False
    """compile each block by torch.compile"""
    accumulation: int | None = Field(None, ge=1)
    """number of micro-batches into which the samples of a rank are split (default:
    train.accumulation)"""
    offload: bool = False
    """fsdp1, fsdp2: keep shards and optimizer states in host memory"""
    window: int | None = Field(None, ge=2)
    """slide: number of units that fit on the device at a time, besides the root (default 2)"""
    param_transfer: Literal["full", "shard"] | None = None
    """slide: every rank loads whole units (full, default), or loads its shard, and the ranks
    all-gather units on the device"""
    grad_sync: Literal["gpu_reduce", "cpu_reduce"] | None = None
    """slide: reduce gradients on the device after every micro-batch, after which each rank copies
    its shard to host memory; or copy the whole gradients of each rank and sum them in host memory
    (default)"""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """slide: type of the stored moments. bf16 rounds second moments stochastically, so that their
    updates are unbiased"""
    moments: Literal["memory", "disk"] | None = None
    """slide: storage of the moments: host memory (default), or a mapped file in .work/moments or in
    the folder that the environment variable SHARDLAB_MOMENTS names"""
    sync: Sync | None = None
    """ddp; fsdp2, manual with replicas: they train alone and synchronise their parameters
    (default: they reduce the gradients of every step)"""
    gradients: Gradients = Compression()
    """compression of the gradients"""
    weights: Weights | None = None
    """fsdp1, fsdp2, manual, and slide with param_transfer: shard: compression of gathered
    parameters (default: none)"""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine."""
        return ENGINES[self.engine]

    def depths(self) -> tuple[int, int]:
        """Return the number of units gathered ahead in forward and in backward."""
        forward, backward = self.prefetch, self.prefetch_backward
        if forward is None:
            several_gathered = self.wrap != "root" and self.sharding != "no_shard"
            forward = self.traits.prefetch if several_gathered else 0
        if backward is None:
            backward = self.traits.prefetch_backward
        return forward, forward if backward is None else backward


def canonical_overrides(
    overrides: Iterable[Override], base: Mapping[str, Any]
) -> tuple[Override, ...]:
    """Return one override per combination of settings, without those that change nothing.

    Later overrides win.

    Args:
        base: settings of the strategy.
    """
    layers: dict[int, dict[str, Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    for override in overrides:
        settings = override.settings()
        if override.module is not None:
            modules.setdefault(override.module, {}).update(settings)
        for layer in override.layers or ():
            layers.setdefault(layer, {}).update(settings)
    merged: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for layer in sorted(layers):
        changed = _changed(layers[layer], base)
        if changed:
            merged.setdefault(tuple(changed.items()), []).append(layer)
    return (
        *(Override(layers=tuple(where), **dict(what)) for what, where in merged.items()),
        *(Override(module=name, **_changed(modules[name], base)) for name in sorted(modules)),  # type: ignore[arg-type]
    )


def _changed(settings: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    pairs = ((key, settings[key]) for key in SETTINGS if key in settings)
    return {key: value for key, value in pairs if value != base[key]}
