"""Traits of every engine: its settings and defaults, what it keeps in memory, when it communicates.

This table is the one place that tells engines apart without importing them, so that parameters are
read without torch. Validation, canonical form, label, memory model, forecast and search ask it for
a trait and never for a name. A new engine is a row here and the class that it names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shardlab.strategy.codec_table import CODECS

EngineName = Literal["ddp", "fsdp1", "fsdp2", "manual", "slide"]


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Facts about one engine that hold for every strategy."""

    factory: str
    """`"module:Class"`, imported when the first engine is built"""
    in_scripts: str | None = None
    """what a training script uses in its place; None: an engine of the pipeline alone"""

    # settings
    settings: frozenset[str]
    """settings of a strategy that this engine has and some other engine lacks"""
    defaults: Mapping[str, Any]
    """values of those settings in the canonical form, where they are not None"""
    native_route: bool = True
    """by default the process group's own collective reduces uncompressed gradients"""
    prefetch: int = 0
    """default number of units gathered ahead in forward"""
    prefetch_backward: int | None = None
    """default number of units gathered ahead in backward; None: as many as in forward"""
    max_prefetch: int | None = None
    """largest number of units gathered ahead; None: any"""
    multi_block_units: bool = True
    """a unit may consist of several transformer blocks"""
    unit_overrides: bool = False
    """units may have settings of their own, and embedding and head may be units"""
    subgroup_reshard: bool = False
    """`reshard_after_forward` may be a number of ranks"""
    compiles: bool = True
    """blocks can be compiled: the storage of a parameter stays where it is between uses"""

    # memory
    residency: Literal["replicated", "sharded", "streamed"]
    """parameters and optimizer states between steps: whole on every rank; divided among the ranks
    of a copy of the model; in host memory, with a window of units on the device"""
    autocast: bool = False
    """computes in narrow types by autocast, which keeps narrow copies of all weights until
    backward has ended"""
    no_shard_in_place: bool = False
    """with `sharding: no_shard` it computes with the parameters themselves, without a copy"""
    all_gather_buffer: bool = False
    """all-gather fills a buffer of its own, which stays until the next one is filled"""
    gradient_buffers: Literal["buckets", "temporary", "pool"]
    """what gradients are reduced in: buckets of which gradients are views; a new vector for each
    unit; vectors that are allocated once and used again"""
    gradients_stay: bool = False
    """gradients stay allocated between steps"""
    accumulates_in_reduce_dtype: bool = False
    """whole gradients of earlier micro-batches are summed in `reduce_dtype`"""

    # communication
    flat_gradients: bool = False
    """gradients are reduced as flat vectors, in which a codec sees no matrices"""
    overlap: Literal["streams", "async_unshard", "threads"] = "streams"
    """what overlaps collectives of units with computation: streams of the device; on a CPU threads
    of ours, where `async_unshard` or prefetch asks for them; threads of ours, always"""
    last_unit_stays: bool = False
    """the last unit of forward, with which backward begins, is never resharded between them"""


_UNITS = frozenset({"wrap", "wrap_size", "reduce_dtype", "weights"})
_SHARDED = _UNITS | {
    *("sharding", "replicas", "reshard_after_forward"),
    *("prefetch", "prefetch_backward"),
}
_SHARDED_DEFAULTS = {"sharding": "full_shard", "wrap": "block", "reshard_after_forward": True}

ENGINES: Mapping[EngineName, EngineTraits] = MappingProxyType(
    {
        "ddp": EngineTraits(
            factory="shardlab.engines.autograd:DDPEngine",
            in_scripts="DistributedDataParallel",
            settings=frozenset({"bucket_mb", "sync"}),
            defaults={"bucket_mb": 25.0},
            residency="replicated",
            autocast=True,
            gradient_buffers="buckets",
            gradients_stay=True,
        ),
        "fsdp1": EngineTraits(
            factory="shardlab.engines.fsdp1:FSDP1Engine",
            in_scripts="FullyShardedDataParallel",
            settings=_SHARDED | {"limit_all_gathers", "use_orig_params", "offload"},
            defaults=_SHARDED_DEFAULTS,
            prefetch_backward=1,
            max_prefetch=1,
            multi_block_units=False,
            residency="sharded",
            no_shard_in_place=True,
            gradient_buffers="temporary",
            flat_gradients=True,
        ),
        "fsdp2": EngineTraits(
            factory="shardlab.engines.fsdp2:FSDP2Engine",
            in_scripts="fully_shard",
            settings=_SHARDED | {"placement", "async_unshard", "output_dtype", "offload", "sync"},
            defaults=_SHARDED_DEFAULTS | {"placement": "dim0"},
            unit_overrides=True,
            subgroup_reshard=True,
            residency="sharded",
            all_gather_buffer=True,
            gradient_buffers="temporary",
            accumulates_in_reduce_dtype=True,
            overlap="async_unshard",
        ),
        "manual": EngineTraits(
            factory="shardlab.engines.manual:ManualEngine",
            settings=_SHARDED | {"sync"},
            defaults=_SHARDED_DEFAULTS,
            native_route=False,
            prefetch=1,
            unit_overrides=True,
            residency="sharded",
            gradient_buffers="pool",
            gradients_stay=True,
            flat_gradients=True,
            overlap="threads",
            last_unit_stays=True,
        ),
        "slide": EngineTraits(
            factory="shardlab.engines.slide:SlideEngine",
            in_scripts="shardlab.SlideFSDP; or fully_shard, which differs in time",
            settings=_UNITS | {"window", "param_transfer", "grad_sync", "moment_dtype", "moments"},
            defaults={
                "wrap": "block",
                "window": 2,
                "param_transfer": "full",
                "grad_sync": "cpu_reduce",
            },
            compiles=False,
            residency="streamed",
            gradient_buffers="pool",
            flat_gradients=True,
            overlap="threads",
        ),
    }
)


def inapplicable(engine: EngineName) -> frozenset[str]:
    """Return the settings that only other engines have."""
    return frozenset().union(*(traits.settings for traits in ENGINES.values())) - (
        ENGINES[engine].settings
    )


def engines_with(setting: str) -> str:
    """Return the engines that have a setting, as in `ddp, fsdp2 or manual`."""
    *others, last = [name for name, traits in ENGINES.items() if setting in traits.settings]
    return f"{', '.join(others)} or {last}" if others else last


def accepts_codec(engine: EngineName, codec: str) -> bool:
    """Return whether the gradient codec of this name compresses anything under this engine.

    Codecs that factor matrices leave the flat vectors of some engines as they are.
    """
    spec = CODECS.get(codec)
    return spec is None or not (spec.needs_matrices and ENGINES[engine].flat_gradients)
