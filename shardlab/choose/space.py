"""Space of the search: every legal strategy on a grid of settings that fits in memory.

Settings have a few values each, whose product is validated as any strategy is; what an engine
lacks, cannot do or does alike drops out. `sync` is not combined with codecs of gradients or
weights, and is only there where the training runs are long enough for it. To recompute activations
or to split a batch only saves memory and takes time, so of these the first that fits is taken.
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
"""some settings of a strategy"""

_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
_AHEAD = (0, 1, 2)
"""units gathered ahead"""
_WINDOWS = (2, 3, 4)


class Feasible(NamedTuple):
    """A strategy that can be tried."""

    strategy: CanonicalStrategy
    hash: str
    memory_bytes: int
    """peak of a rank"""
    step: Estimate | str = "not predicted"
    """in seconds, or why it cannot be predicted"""
    action: Action | None = None
    """that makes it of the incumbent"""


Peak = Callable[[CanonicalStrategy], int]
"""peak memory of a rank under a strategy, bytes; raises UserError where it does not fit the model
"""


def formula_bytes(strategy: CanonicalStrategy, shapes: "ModelShapes", world_size: int) -> int:
    """Return the peak of a rank by the closed form, of the memory that limits it."""
    need = device_memory(strategy, shapes.sizes(strategy), world_size, shapes.on_gpu)
    return sum(need.values())


def peak_of(history: History, shapes: "ModelShapes") -> Peak:
    """Return the formula plus what the start's peak has beyond it, such as the interpreter."""
    start, load = history.start_results, history.workload
    measured = max(run.memory_peak_bytes for run in start.trained)
    rest = max(0, measured - formula_bytes(start.strategy, shapes, load.trained_on))
    return lambda strategy: rest + formula_bytes(strategy, shapes, load.world_size)


def peaks_of(history: History, shapes: "ModelShapes") -> dict[str, int]:
    """Return the peak of a rank by hash of all that was measured: its own, or else predicted.

    Where training ran on other ranks than the search has, its peaks are none of the search.
    """
    peak, load = peak_of(history, shapes), history.workload
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
    """Yield the feasible strategies of the grid, each meaning once, in a fixed order.

    Of strategies that only differ in how they save activation memory the fastest that fits comes,
    and the others are spared.

    Args:
        count: how many `strategies` are legal, `beyond_memory` and `spared`.
    """
    seen: set[str] = set()
    levels = frugality(shapes.samples)
    for document in documents(space, shapes.layers, world_size):
        for number, level in enumerate(levels):
            try:
                strategy = parse_strategy(document | level).canonical()
                check_fits(strategy, world_size, shapes.samples)
                memory = peak(strategy)
            except UserError:
                if number == 0:
                    break  # no level changes what is wrong with the rest
                continue
            key = strategy.hash()
            if key in seen:
                break
            seen.add(key)
            count["strategies"] += 1
            if memory <= limit_bytes:
                spared = len(levels) - number - 1
                count.update(strategies=spared, spared=spared)
                yield Feasible(strategy, key, memory)
                break
            count["beyond_memory"] += 1


def settled(space: Space, steps: int) -> tuple[Space, str]:
    """Return the space without `sync` that training runs are too short for, and that in words;
    empty where they are long enough for all of it.

    Args:
        steps: of the training runs; 0 where they show nothing of `sync`.
    """
    short = [sync for sync in space.sync if sync.exchanges(steps) < ENOUGH_EXCHANGES]
    kept = (*(sync for sync in space.sync if sync not in short),)
    counts = [f" ({sync.exchanges(steps)})" if steps else "" for sync in short]
    named = ", ".join(f"every={sync.every}{n}" for sync, n in zip(short, counts, strict=True))
    reason = f"training runs of {steps} steps synchronise fewer than {ENOUGH_EXCHANGES} times"
    if not steps:
        reason = "the training runs have other ranks than the search"
    return space.model_copy(update={"sync": kept}), named and f"sync {named}: {reason}"


def documents(space: Space, layers: int, world_size: int) -> Iterator[PartialStrategy]:
    """Return every combination but for frugality, legal or not, as plain data.

    Args:
        layers: transformer blocks of the model.
    """
    for engine, traits in ENGINES.items():
        structures = product(
            _units(traits, layers), _meshes(traits, world_size), _motion(traits, layers)
        )
        compressed = product(_gradients(engine, space), _weights(traits, space))
        encodings = [gradients | weights for gradients, weights in compressed]
        encodings += _rare(traits, space)
        dtypes = [{}, {"param_dtype": "bf16"}]
        default = traits.defaults.get("bucket_mb")
        for parts in product(list(structures), encodings, dtypes):
            (units, mesh, motion), coded, dtype = parts
            if "overrides" in motion and units.get("wrap_size") != 1:
                continue  # they are of layers, which these units are not
            if "sync" in coded and units.get("bucket_mb", default) != default:
                continue  # no bucket is reduced
            yield {"engine": engine} | units | mesh | motion | coded | dtype


def frugality(samples: int) -> list[PartialStrategy]:
    """Return the levels of what saves activation memory at the cost of time, cheapest first.

    Args:
        samples: number of samples that one rank sees in a step.
    """
    modes = [{}, *({"activation_checkpointing": mode} for mode in ("selective", "full"))]
    counts = [count for count in (2, 4, 8, 16) if samples % count == 0]
    return [*modes, *(modes[-1] | {"accumulation": count} for count in counts)]


def _units(traits: EngineTraits, layers: int) -> list[PartialStrategy]:
    """Return the units: blocks by powers of two, and the whole model; or the sizes of buckets."""
    if "wrap" not in traits.settings:
        return [{"bucket_mb": size} for size in _BUCKETS_MB]
    sizes = [2**power for power in range(layers.bit_length()) if 2**power < layers]
    blocks = [{"wrap": "block", "wrap_size": size} for size in sizes or [1]]
    return [*(blocks if traits.multi_block_units else blocks[:1]), {"wrap": "root"}]


def _meshes(traits: EngineTraits, world_size: int) -> list[PartialStrategy]:
    if "sharding" not in traits.settings:
        return [{}]
    copies = [count for count in range(2, world_size) if world_size % count == 0]
    hybrid = [{"sharding": "hybrid_shard", "replicas": count} for count in copies]
    return [{}, {"sharding": "no_shard"}, *hybrid]


def _motion(traits: EngineTraits, layers: int) -> list[PartialStrategy]:
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
    ahead = [{"prefetch": count} for count in _AHEAD if count <= (traits.max_prefetch or count)]
    # settings that are pointless, such as those of what a whole unit gathers, only by themselves
    return [{}, *(a | b for a, b in product(resharding, ahead))]


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


def _rare(traits: EngineTraits, space: Space) -> list[PartialStrategy]:
    """Return the synchronisations of replicas, whose gradients are not compressed, too."""
    rare = space.sync if "sync" in traits.settings else ()
    return [{"sync": sync.model_dump(mode="json")} for sync in rare]
