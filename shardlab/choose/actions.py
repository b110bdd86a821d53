"""Actions of the search: named changes of one setting of the incumbent, and of nothing else.

An action says what it changes, which hypothesis it tests, and which measured fact speaks for it.
Without that fact it is not offered, so that a rejected round refutes one hypothesis.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardlab.choose import facts
from shardlab.choose.facts import Measurements
from shardlab.choose.records import Action
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.predict.settings import Space
from shardlab.strategy.compression import Compression, gradient_words, setting_words
from shardlab.strategy.document import (
    CanonicalStrategy,
    Strategy,
    differences,
    override_words,
    parse_strategy,
)
from shardlab.strategy.engine_traits import accepts_codec
from shardlab.strategy.sync import ENOUGH_EXCHANGES

_BITS = {"none": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "efsign": 1, "onebit": 1}
"""Bits per element, by codec. One step coarser is the next lower number in the space."""
_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)


class Choices(NamedTuple):
    """Codecs, layers and synchronisations that actions may use."""

    space: Space
    """Space of the search, without values of `sync` for which training runs are too short."""
    layers: int
    """Number of transformer blocks of the model."""
    steps: int
    """Steps of a training run; 0 where training runs have another number of replicas."""


ChangedSetting = dict[str, Any]
"""One setting with its new value."""
Change = Callable[[CanonicalStrategy, Choices], ChangedSetting | None]
"""Returns the changed setting of a strategy, or None where there is nothing to change."""


class Rule(NamedTuple):
    """An action, and the fact that has to speak for it."""

    name: str
    hypothesis: str
    """Why the change might be faster, or fit in memory."""
    fact: Callable[[Measurements], str | None]
    change: Change


def actions(
    incumbent: CanonicalStrategy, measured: Measurements, choices: Choices
) -> Iterator[tuple[CanonicalStrategy, Action]]:
    """Yield the actions for which a fact speaks, in the order of `RULES`, each with the legal
    strategy that it leads to; of actions that lead to one strategy the first is yielded."""
    seen = {incumbent.hash()}
    document = incumbent.model_dump(mode="json")
    for rule in RULES:
        fact, part = rule.fact(measured), rule.change(incumbent, choices)
        if fact is None or part is None:
            continue
        try:
            strategy = parse_strategy(document | part).canonical()
        except UserError:
            continue  # the engine cannot do it
        if strategy.hash() in seen:
            continue
        seen.add(strategy.hash())
        words = {"name": rule.name, "hypothesis": rule.hypothesis, "fact": fact}
        yield strategy, Action(**words, change=change_words(incumbent, strategy))


def change_words(before: CanonicalStrategy, after: CanonicalStrategy) -> str:
    """Return each setting that differs with both values, such as `prefetch=1 -> prefetch=2`."""
    keys = differences(before, after)
    return "; ".join(f"{_words(before, key)} -> {_words(after, key)}" for key in keys)


def _words(strategy: CanonicalStrategy, key: str) -> str:
    value = getattr(strategy, key)
    match value:
        case Compression():
            return ", ".join(["gradients", *gradient_words(value)])
        case Document():
            return setting_words(strategy, Strategy.model_construct(), key)[0]
        case tuple():
            return ", ".join(map(override_words, value)) or f"{key}=none"
        case bool() | None:
            return f"{key}={str(value).lower()}"
    return f"{key}={value}"


def _has(strategy: CanonicalStrategy, setting: str) -> bool:
    return setting in strategy.traits.settings


def _prefetch(step: int) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        count = (strategy.prefetch or 0) + step
        limit = min(choices.layers, strategy.traits.max_prefetch or choices.layers)
        return {"prefetch": count} if _has(strategy, "prefetch") and 0 <= count <= limit else None

    return change


def _reshard(value: bool) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        differs = strategy.reshard_after_forward is not value
        return {"reshard_after_forward": value} if differs else None

    return change


def _last_layers(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    layers, traits = [*range(choices.layers // 2, choices.layers)], strategy.traits
    # overrides are of single layers; some engines keep the last unit gathered in any case
    if not traits.unit_overrides or strategy.overrides or strategy.wrap_size is not None:
        return None
    if not strategy.reshard_after_forward or len(layers) <= traits.last_unit_stays:
        return None
    return {"overrides": [{"layers": layers, "reshard_after_forward": False}]}


def _window(step: int) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        if strategy.window is None:
            return None
        count = strategy.window + step
        return {"window": count} if 2 <= count <= max(choices.layers, 2) else None

    return change


def _merge(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    if strategy.bucket_mb is not None:
        larger = [size for size in _BUCKETS_MB if size > strategy.bucket_mb]
        return {"bucket_mb": larger[0]} if larger else None
    size = 2 * (strategy.wrap_size or 1)
    blocks = strategy.wrap == "block" and strategy.traits.multi_block_units
    return {"wrap_size": size} if blocks and size < choices.layers else None


def _split(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    if strategy.bucket_mb is not None:
        smaller = [size for size in _BUCKETS_MB if size < strategy.bucket_mb]
        return {"bucket_mb": smaller[-1]} if smaller else None
    possible = strategy.wrap == "block" and strategy.wrap_size is not None
    return {"wrap_size": (strategy.wrap_size or 1) // 2} if possible else None


def _exchange(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    gradients = strategy.gradients
    native = gradients.plain() and gradients.route == "native" and strategy.sync is None
    return {"gradients": {"route": "exchange"}} if native else None


def _narrow_reduction(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    plain = strategy.gradients.plain() and strategy.sync is None
    return {"reduce_dtype": "bf16"} if plain and _has(strategy, "reduce_dtype") else None


def _gradients(coarser: bool) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        gradients = strategy.gradients
        if strategy.sync is not None or gradients.between_nodes is not None:
            return None
        offered: dict[str, Compression] = {}
        for spec in choices.space.gradients:
            if accepts_codec(strategy.engine, spec.codec.name) and spec.between_nodes is None:
                offered.setdefault(spec.codec.name, spec)
        codec = _next(gradients.codec.name, [*offered], coarser)
        if codec is None or codec == "none":
            return None if codec is None else {"gradients": {}}
        # uncompressed gradients have no options that the codec could inherit
        names = [] if gradients.plain() else ["minimum_size", "exclude", "warmup_steps"]
        if gradients.error_feedback and offered[codec].error_feedback:
            names += ["residual", "decay"]
        inherited = {name: getattr(gradients, name) for name in names}
        compression = offered[codec].model_copy(update=inherited)
        return {"gradients": compression.model_dump(mode="json")}

    return change


def _weights(coarser: bool) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        if strategy.sync is not None or not _has(strategy, "weights"):
            return None
        offered = {spec.name: spec.model_dump(mode="json") for spec in choices.space.weights}
        current = strategy.weights.codec.name if strategy.weights else "none"
        codec = _next(current, [*offered], coarser)
        if codec is None or codec == "none":
            return None if codec is None else {"weights": None}
        return {"weights": {"codec": offered[codec]}}

    return change


def _next(codec: str, offered: Sequence[str], coarser: bool) -> str | None:
    """Return the offered codec with the next lower or higher number of bits, or None."""
    bits = {name: _BITS[name] for name in ("none", *offered) if name in _BITS}
    if codec not in _BITS:
        return None
    if coarser:
        lower = [name for name in bits if bits[name] < _BITS[codec]]
        return max(lower, key=lambda name: bits[name], default=None)
    higher = [name for name in bits if bits[name] > _BITS[codec]]
    return min(higher, key=lambda name: bits[name], default=None)


def _feedback(value: bool) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        if strategy.gradients.plain() or strategy.gradients.error_feedback is value:
            return None
        gradients = strategy.gradients.model_dump(mode="json", exclude={"residual", "decay"})
        return {"gradients": gradients | {"error_feedback": value}}

    return change


def _begin_sync(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
    plain = strategy.gradients.plain() and strategy.weights is None
    if strategy.sync is not None or not _has(strategy, "sync") or not plain:
        return None
    if not choices.space.sync:
        return None
    return {"sync": choices.space.sync[0].model_dump(mode="json")}


def _every(factor: float) -> Change:
    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        if strategy.sync is None:
            return None
        sync = strategy.sync.model_copy(update={"every": int(strategy.sync.every * factor)})
        possible = sync.every >= 1 and sync.exchanges(choices.steps) >= ENOUGH_EXCHANGES
        return {"sync": sync.model_dump(mode="json")} if possible else None

    return change


def _recompute(step: int) -> Change:
    modes = ("none", "selective", "full")

    def change(strategy: CanonicalStrategy, choices: Choices) -> ChangedSetting | None:
        index = modes.index(strategy.activation_checkpointing) + step
        return {"activation_checkpointing": modes[index]} if 0 <= index < len(modes) else None

    return change


RULES = (
    # gathers
    Rule(
        "gather one unit further ahead",
        "parameters arrive late: gather earlier",
        facts.gathers_exposed,
        _prefetch(+1),
    ),
    Rule(
        "gather one unit less ahead",
        "units that wait hold memory: gather later",
        facts.full,
        _prefetch(-1),
    ),
    Rule(
        "keep all layers gathered",
        "backward gathers again what forward had: keep it",
        facts.gathered_twice,
        _reshard(False),
    ),
    Rule(
        "keep the last layers gathered",
        "backward begins with what forward ended with: keep that",
        facts.gathered_twice,
        _last_layers,
    ),
    Rule(
        "gather again in backward",
        "parameters that wait for backward hold memory: free them",
        facts.full,
        _reshard(True),
    ),
    Rule(
        "widen the window by a layer",
        "layers arrive late: keep more of them on the device",
        facts.exposed,
        _window(+1),
    ),
    Rule(
        "narrow the window by a layer",
        "layers of the window hold memory: keep fewer",
        facts.full,
        _window(-1),
    ),
    # size of messages
    Rule(
        "send twice as much at once",
        "many small collectives wait for each other: merge units or buckets",
        facts.many_collectives,
        _merge,
    ),
    Rule(
        "send half as much at once",
        "communication begins late: split units or buckets",
        facts.no_overlap,
        _split,
    ),
    # bytes of messages
    Rule(
        "exchange gradients and sum them here",
        "the process group moves more than it has to: send each rank its part",
        facts.moved_twice,
        _exchange,
    ),
    Rule(
        "reduce gradients in bf16",
        "gradients fill the link: halve their bytes without a codec",
        facts.mostly("gradients"),
        _narrow_reduction,
    ),
    Rule(
        "code gradients one step coarser",
        "gradients fill the link: send fewer bits",
        facts.mostly("gradients"),
        _gradients(coarser=True),
    ),
    Rule(
        "code gradients one step finer",
        "the codec costs quality: send more bits",
        facts.worse,
        _gradients(coarser=False),
    ),
    Rule(
        "feed the error back",
        "what the codec drops is lost: add it to the next gradient",
        facts.lossy,
        _feedback(True),
    ),
    Rule(
        "stop feeding the error back",
        "coding takes time: keep no residual",
        facts.coding,
        _feedback(False),
    ),
    Rule(
        "code weights one step coarser",
        "gathered parameters fill the link: send fewer bits",
        facts.mostly("weights"),
        _weights(coarser=True),
    ),
    Rule(
        "code weights one step finer",
        "the codec costs quality: send more bits",
        facts.worse,
        _weights(coarser=False),
    ),
    # parameters instead of gradients
    Rule(
        "synchronise parameters instead of gradients",
        "gradients fill the link: synchronise parameters every few steps",
        facts.mostly_exposed,
        _begin_sync,
    ),
    Rule(
        "synchronise half as often",
        "synchronisations fill the link: synchronise less often",
        facts.exposed,
        _every(2),
    ),
    Rule(
        "synchronise twice as often",
        "replicas drift apart: synchronise more often",
        facts.worse,
        _every(0.5),
    ),
    # activations
    Rule(
        "recompute more activations",
        "activations hold memory: recompute them",
        facts.full,
        _recompute(+1),
    ),
    Rule(
        "recompute fewer activations",
        "memory is left: keep activations",
        facts.half_empty,
        _recompute(-1),
    ),
)
"""Every action that the search may take."""
