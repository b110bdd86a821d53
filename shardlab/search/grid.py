"""Every legal strategy on a grid of settings: what the search chooses from.

Settings have a few values each, whose product is validated as any strategy is; what an engine
lacks, cannot do or does alike drops out. To recompute activations or to split a batch only saves
memory and takes time, so both are levels of frugality, of which the search takes the first that
fits (`shardlab.search.feasible`).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from shardlab.config.engine_traits import ENGINES, EngineName, EngineTraits, accepts_codec
from shardlab.config.schema import Space

Part = dict[str, Any]
"""some settings of a strategy"""

_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
_AHEAD = (0, 1, 2)
"""units gathered ahead"""
_WINDOWS = (2, 3, 4)


def documents(space: Space, layers: int, world_size: int) -> Iterator[Part]:
    """Return every combination but for frugality, legal or not, as plain data.

    Args:
        layers: transformer blocks of the model.
    """
    for engine, traits in ENGINES.items():
        structures = product(
            _units(traits, layers), _meshes(traits, world_size), _motion(traits, layers)
        )
        encodings = product(_gradients(engine, space), _weights(traits, space))
        dtypes = [{}, {"param_dtype": "bf16"}]
        for parts in product(list(structures), list(encodings), dtypes):
            (units, mesh, motion), (gradients, weights), dtype = parts
            if "overrides" in motion and units.get("wrap_size") != 1:
                continue  # they are of layers, which these units are not
            yield {"engine": engine} | units | mesh | motion | gradients | weights | dtype


def frugality(samples: int) -> list[Part]:
    """Return the levels of what saves activation memory at the cost of time, cheapest first.

    Args:
        samples: number of samples that one rank sees in a step.
    """
    modes = [{}, *({"activation_checkpointing": mode} for mode in ("selective", "full"))]
    counts = [count for count in (2, 4, 8, 16) if samples % count == 0]
    return [*modes, *(modes[-1] | {"accumulation": count} for count in counts)]


def _units(traits: EngineTraits, layers: int) -> list[Part]:
    """Return the units: blocks by powers of two, and the whole model; or the sizes of buckets."""
    if "wrap" not in traits.settings:
        return [{"bucket_mb": size} for size in _BUCKETS_MB]
    sizes = [2**power for power in range(layers.bit_length()) if 2**power < layers]
    blocks = [{"wrap": "block", "wrap_size": size} for size in sizes or [1]]
    return [*(blocks if traits.multi_block_units else blocks[:1]), {"wrap": "root"}]


def _meshes(traits: EngineTraits, world_size: int) -> list[Part]:
    if "sharding" not in traits.settings:
        return [{}]
    copies = [count for count in range(2, world_size) if world_size % count == 0]
    hybrid = [{"sharding": "hybrid_shard", "replicas": count} for count in copies]
    return [{}, {"sharding": "no_shard"}, *hybrid]


def _motion(traits: EngineTraits, layers: int) -> list[Part]:
    """Return when parameters are gathered or brought, and where gradients are reduced."""
    if traits.residency == "streamed":
        return [
            {"window": window, "param_transfer": transfer, "grad_sync": sync}
            for window, transfer, sync in product(
                [each for each in _WINDOWS if each <= max(layers, 2)],
                ("full", "shard"),
                ("cpu_reduce", "gpu_reduce"),
            )
        ]
    if "prefetch" not in traits.settings:
        return [{}]
    kept: list[Part] = [{"reshard_after_forward": value} for value in (True, False)]
    # between both: the half of the layers with which backward begins, unless they stay anyway
    last = [*range(layers // 2, layers)]
    if traits.unit_overrides and layers > 1 and len(last) > traits.last_unit_stays:
        kept.append({"overrides": [{"layers": last, "reshard_after_forward": False}]})
    ahead = [{"prefetch": count} for count in _AHEAD if count <= (traits.max_prefetch or count)]
    # settings that are pointless, such as those of what a whole unit gathers, only by themselves
    return [{}, *(a | b for a, b in product(kept, ahead))]


def _gradients(engine: EngineName, space: Space) -> list[Part]:
    plain: list[Part] = [{"gradients": {"route": route}} for route in ("native", "exchange")]
    narrow: list[Part] = [{"reduce_dtype": "bf16"}]
    coded = [
        {"gradients": each.model_dump(mode="json")}
        for each in space.gradients
        if accepts_codec(engine, each.codec.name)
    ]
    return [*plain, *(narrow if "reduce_dtype" in ENGINES[engine].settings else []), *coded]


def _weights(traits: EngineTraits, space: Space) -> list[Part]:
    coded = space.weights if "weights" in traits.settings else ()
    return [{}, *({"weights": {"codec": codec.model_dump(mode="json")}} for codec in coded)]
