"""Space of the search: every legal strategy on a grid of settings that fits in memory.

Each setting has a few values. Their product is validated like any strategy; a combination that an
engine cannot do, or that means the same as an earlier one, drops out. `sync` is not combined with
codecs, and it is proposed only where the training runs are long enough for it. Recomputed
activations and micro-batches only save memory at the cost of time, so the first of these levels
that fits is taken.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from shardlab.choose.history import History
from shardlab.choose.records import Action
from shardlab.core.errors import UserError
from shardlab.models.memory import device_memory
from shardlab.predict.model import Estimate
from shardlab.predict.settings import Space
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.engine_traits import ENGINES, EngineName, EngineTraits, accepts_codec
from shardlab.strategy.sync import ENOUGH_EXCHANGES
from shardlab.strategy.validation import check_fits

if TYPE_CHECKING:  # it needs torch, which a stage that passes one has
    from shardlab.models.sizes import ModelShapes

PartialStrategy = dict[str, Any]
"""Some settings of a strategy, as plain data."""

_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
_PREFETCH = (0, 1, 2)
_WINDOWS = (2, 3, 4)


class Feasible(NamedTuple):
    """A strategy that can be tried."""

    strategy: CanonicalStrategy
    hash: str
    memory_bytes: int
    """Peak of a rank."""
    step: Estimate | str = "not predicted"
    """Predicted step in seconds, or why it cannot be predicted."""
    action: Action | None = None
    """Action that changes the incumbent to it."""


Peak = Callable[[CanonicalStrategy], int]
"""Returns the peak memory of a rank under a strategy, in bytes; raises UserError where the strategy
does not fit the model."""


def formula_bytes(strategy: CanonicalStrategy, shapes: "ModelShapes", world_size: int) -> int:
    """Return the peak of a rank by the closed form, in bytes, of the memory that limits it."""
    by_category = device_memory(strategy, shapes.sizes(strategy), world_size, shapes.on_gpu)
    return sum(by_category.values())


def peak_function(history: History, shapes: "ModelShapes") -> Peak:
    """Return the function that predicts peaks: the formula plus a constant, such as the memory of
    the interpreter, by which the start's measured peak exceeds the formula."""
    start, load = history.start_results, history.workload
    measured = max(run.memory_peak_bytes for run in start.trained)
    constant = max(0, measured - formula_bytes(start.strategy, shapes, load.trained_on))
    return lambda strategy: constant + formula_bytes(strategy, shapes, load.world_size)


def peaks_by_hash(history: History, shapes: "ModelShapes") -> dict[str, int]:
    """Return the peak of a rank in bytes, measured or else predicted, by hash of each measured
    strategy.

    All peaks are predicted where training ran on another number of ranks than the search has.
    """
    peak, load = peak_function(history, shapes), history.workload
    return {
        key: peak(row.strategy) if (measured := row.peak(load)) is None else measured
        for key, row in history.measured.items()
    }


def feasible(
    space: Space,
    shapes: "ModelShapes",
    world_size: int,
    peak: Peak,
    limit_bytes: int,
    count: Counter[str],
) -> Iterator[Feasible]:
    """Yield the feasible strategies of the grid, without repetitions, in a fixed order.

    Where strategies differ only in how they save activation memory, only the fastest one that fits
    is yielded.

    Args:
        count: is updated: how many `strategies` are legal, `beyond_memory` and `spared`.
    """
    seen: set[str] = set()
    levels = memory_saving_levels(shapes.samples)
    for document in grid_documents(space, shapes.layers, world_size):
        for number, level in enumerate(levels):
            try:
                strategy = parse_strategy(document | level).canonical()
                check_fits(strategy, world_size, shapes.samples)
                memory = peak(strategy)
            except UserError:
                if number == 0:
                    break  # the strategy is illegal at every level
                continue
            key = strategy.hash()
            if key in seen:
                break
            seen.add(key)
            count["strategies"] += 1
            if memory <= limit_bytes:
                skipped = len(levels) - number - 1
                count.update(strategies=skipped, spared=skipped)
                yield Feasible(strategy, key, memory)
                break
            count["beyond_memory"] += 1


def drop_short_sync(space: Space, steps: int) -> tuple[Space, str]:
    """Return the space without values of `sync` for which the training runs are too short, and the
    reason in words; the reason is empty where they are long enough for every value.

    Args:
        steps: steps of a training run; 0 where training runs show nothing of `sync`.
    """
    short = [sync for sync in space.sync if sync.exchanges(steps) < ENOUGH_EXCHANGES]
    remaining = (*(sync for sync in space.sync if sync not in short),)
    counts = [f" ({sync.exchanges(steps)})" if steps else "" for sync in short]
    named = ", ".join(f"every={sync.every}{n}" for sync, n in zip(short, counts, strict=True))
    reason = f"training runs of {steps} steps synchronise fewer than {ENOUGH_EXCHANGES} times"
    if not steps:
        reason = "the training runs have other ranks than the search"
    return space.model_copy(update={"sync": remaining}), named and f"sync {named}: {reason}"


def grid_documents(space: Space, layers: int, world_size: int) -> Iterator[PartialStrategy]:
    """Yield every combination of settings, legal or not, without settings that save activations.

    Args:
        layers: transformer blocks of the model.
    """
    for engine, traits in ENGINES.items():
        structures = product(
            _units(traits, layers), _meshes(traits, world_size), _prefetching(traits, layers)
        )
        compressed = product(_gradients(engine, space), _weights(traits, space))
        encodings = [gradients | weights for gradients, weights in compressed]
        encodings += _syncs(traits, space)
        dtypes = [{}, {"param_dtype": "bf16"}]
        default = traits.defaults.get("bucket_mb")
        for parts in product(list(structures), encodings, dtypes):
            (units, mesh, prefetching), encoding, dtype = parts
            if "overrides" in prefetching and units.get("wrap_size") != 1:
                continue  # overrides are of layers, so a unit has to be one layer
            if "sync" in encoding and units.get("bucket_mb", default) != default:
                continue  # with `sync` no bucket is reduced, so its size changes nothing
            yield {"engine": engine} | units | mesh | prefetching | encoding | dtype


def memory_saving_levels(samples: int) -> list[PartialStrategy]:
    """Return the settings that save activation memory at the cost of time, the cheapest first.

    Args:
        samples: samples of one rank in a step.
    """
    modes = [{}, *({"activation_checkpointing": mode} for mode in ("selective", "full"))]
    counts = [count for count in (2, 4, 8, 16) if samples % count == 0]
    return [*modes, *(modes[-1] | {"accumulation": count} for count in counts)]


def _units(traits: EngineTraits, layers: int) -> list[PartialStrategy]:
    """Return the units: 1, 2, 4, ... blocks, and the whole model; or the sizes of buckets."""
    if "wrap" not in traits.settings:
        return [{"bucket_mb": size} for size in _BUCKETS_MB]
    sizes = [2**power for power in range(layers.bit_length()) if 2**power < layers]
    blocks = [{"wrap": "block", "wrap_size": size} for size in sizes or [1]]
    return [*(blocks if traits.multi_block_units else blocks[:1]), {"wrap": "root"}]


def _meshes(traits: EngineTraits, world_size: int) -> list[PartialStrategy]:
    if "sharding" not in traits.settings:
        return [{}]
    replicas = [count for count in range(2, world_size) if world_size % count == 0]
    hybrid = [{"sharding": "hybrid_shard", "replicas": count} for count in replicas]
    return [{}, {"sharding": "no_shard"}, *hybrid]


def _prefetching(traits: EngineTraits, layers: int) -> list[PartialStrategy]:
    """Return when parameters are gathered or transferred, and where gradients are reduced."""
    if traits.residency == "streamed":
        return [
            {"window": window, "param_transfer": transfer, "grad_sync": sync}
            for window, transfer, sync in product(
                [count for count in _WINDOWS if count <= max(layers, 2)],
                ("full", "shard"),
                ("cpu_reduce", "gpu_reduce"),
            )
        ]
    if "prefetch" not in traits.settings:
        return [{}]
    resharding: list[PartialStrategy] = [
        {"reshard_after_forward": value} for value in (True, False)
    ]
    # between both: the half of the layers with which backward begins, unless they stay anyway
    last = [*range(layers // 2, layers)]
    if traits.unit_overrides and layers > 1 and len(last) > traits.last_unit_stays:
        resharding.append({"overrides": [{"layers": last, "reshard_after_forward": False}]})
    prefetch = [
        {"prefetch": count} for count in _PREFETCH if count <= (traits.max_prefetch or count)
    ]
    # {}: for units on which these settings have no effect, such as the whole model
    return [{}, *(a | b for a, b in product(resharding, prefetch))]


def _gradients(engine: EngineName, space: Space) -> list[PartialStrategy]:
    plain: list[PartialStrategy] = [
        {"gradients": {"route": route}} for route in ("native", "exchange")
    ]
    narrow: list[PartialStrategy] = [{"reduce_dtype": "bf16"}]
    coded = [
        {"gradients": gradients.model_dump(mode="json")}
        for gradients in space.gradients
        if accepts_codec(engine, gradients.codec.name)
    ]
    return [*plain, *(narrow if "reduce_dtype" in ENGINES[engine].settings else []), *coded]


def _weights(traits: EngineTraits, space: Space) -> list[PartialStrategy]:
    coded = space.weights if "weights" in traits.settings else ()
    return [{}, *({"weights": {"codec": codec.model_dump(mode="json")}} for codec in coded)]


def _syncs(traits: EngineTraits, space: Space) -> list[PartialStrategy]:
    """Return the values of `sync`, without codecs."""
    syncs = space.sync if "sync" in traits.settings else ()
    return [{"sync": sync.model_dump(mode="json")} for sync in syncs]
