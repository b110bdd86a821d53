"""Actions of the search: named changes of one setting of the incumbent, and of nothing else.

An action says what it changes, which hypothesis it tests, and which measured fact speaks for it;
without that fact it is not offered. So a round that is rejected says something of one hypothesis.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardlab.choose import facts
from shardlab.choose.facts import Facts
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
"""of an element, by codec: one step coarser is the next lower number that the space has"""
_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)


class Offer(NamedTuple):
    """Codecs, layers and rounds that actions may use."""

    space: Space
    """of `sync` only what the training runs are long enough for"""
    layers: int
    """transformer blocks of the model"""
    steps: int
    """of the training runs; 0 where they have other replicas, and show no `sync`"""


ChangedSetting = dict[str, Any]
"""one setting with its new value"""
Change = Callable[[CanonicalStrategy, Offer], ChangedSetting | None]
"""returns the changed setting of a strategy, or None where there is nothing to change"""


class Rule(NamedTuple):
    """An action, and the fact that has to speak for it."""

    name: str
    hypothesis: str
    """why that might be faster, or fit"""
    fact: Callable[[Facts], str | None]
    change: Change


def actions(
    incumbent: CanonicalStrategy, measured: Facts, offer: Offer
) -> Iterator[tuple[CanonicalStrategy, Action]]:
    """Yield what the facts speak for: legal strategies that differ from the incumbent in one
    setting, each once, in the order of `RULES`."""
    seen = {incumbent.hash()}
    document = incumbent.model_dump(mode="json")
    for rule in RULES:
        fact, part = rule.fact(measured), rule.change(incumbent, offer)
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


def _ahead(step: int) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        count = (held.prefetch or 0) + step
        most = min(offer.layers, held.traits.max_prefetch or offer.layers)
        return {"prefetch": count} if _has(held, "prefetch") and 0 <= count <= most else None

    return change


def _reshard(value: bool) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        return {"reshard_after_forward": value} if held.reshard_after_forward is not value else None

    return change


def _last_layers(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    layers = [*range(offer.layers // 2, offer.layers)]
    # with one layer to a unit; the last one may stay gathered anyway
    possible = held.traits.unit_overrides and not held.overrides and held.wrap_size is None
    if not possible or not held.reshard_after_forward or len(layers) <= held.traits.last_unit_stays:
        return None
    return {"overrides": [{"layers": layers, "reshard_after_forward": False}]}


def _window(step: int) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        if held.window is None:
            return None
        count = held.window + step
        return {"window": count} if 2 <= count <= max(offer.layers, 2) else None

    return change


def _merge(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    if held.bucket_mb is not None:
        larger = [size for size in _BUCKETS_MB if size > held.bucket_mb]
        return {"bucket_mb": larger[0]} if larger else None
    size = 2 * (held.wrap_size or 1)
    possible = held.wrap == "block" and held.traits.multi_block_units and size < offer.layers
    return {"wrap_size": size} if possible else None


def _split(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    if held.bucket_mb is not None:
        smaller = [size for size in _BUCKETS_MB if size < held.bucket_mb]
        return {"bucket_mb": smaller[-1]} if smaller else None
    possible = held.wrap == "block" and held.wrap_size is not None
    return {"wrap_size": (held.wrap_size or 1) // 2} if possible else None


def _exchange(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    native = held.gradients.plain() and held.gradients.route == "native" and held.sync is None
    return {"gradients": {"route": "exchange"}} if native else None


def _narrow_reduction(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    possible = _has(held, "reduce_dtype") and held.gradients.plain() and held.sync is None
    return {"reduce_dtype": "bf16"} if possible else None


def _gradients(coarser: bool) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        now = held.gradients
        if held.sync is not None or now.between_nodes is not None:
            return None
        offered: dict[str, Compression] = {}
        for spec in offer.space.gradients:
            if accepts_codec(held.engine, spec.codec.name) and spec.between_nodes is None:
                offered.setdefault(spec.codec.name, spec)
        codec = _next(now.codec.name, [*offered], coarser)
        if codec is None or codec == "none":
            return None if codec is None else {"gradients": {}}
        # what is not compressed has no options to keep
        kept = [] if now.plain() else ["minimum_size", "exclude", "warmup_steps"]
        if now.error_feedback and offered[codec].error_feedback:
            kept += ["residual", "decay"]
        changed = offered[codec].model_copy(update={name: getattr(now, name) for name in kept})
        return {"gradients": changed.model_dump(mode="json")}

    return change


def _weights(coarser: bool) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        if held.sync is not None or not _has(held, "weights"):
            return None
        offered = {spec.name: spec.model_dump(mode="json") for spec in offer.space.weights}
        codec = _next(held.weights.codec.name if held.weights else "none", [*offered], coarser)
        if codec is None or codec == "none":
            return None if codec is None else {"weights": None}
        return {"weights": {"codec": offered[codec]}}

    return change


def _next(now: str, offered: Sequence[str], coarser: bool) -> str | None:
    """Return a codec with the next lower or higher number of bits, or None."""
    bits = {name: _BITS[name] for name in ("none", *offered) if name in _BITS}
    if now not in _BITS:
        return None
    if coarser:
        lower = [name for name in bits if bits[name] < _BITS[now]]
        return max(lower, key=lambda name: bits[name], default=None)
    higher = [name for name in bits if bits[name] > _BITS[now]]
    return min(higher, key=lambda name: bits[name], default=None)


def _feedback(value: bool) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        if held.gradients.plain() or held.gradients.error_feedback is value:
            return None
        kept = held.gradients.model_dump(mode="json", exclude={"residual", "decay"})
        return {"gradients": kept | {"error_feedback": value}}

    return change


def _begin_sync(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
    plain = held.gradients.plain() and held.weights is None
    if held.sync is not None or not _has(held, "sync") or not plain or not offer.space.sync:
        return None
    return {"sync": offer.space.sync[0].model_dump(mode="json")}


def _every(factor: float) -> Change:
    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        if held.sync is None:
            return None
        changed = held.sync.model_copy(update={"every": int(held.sync.every * factor)})
        possible = changed.every >= 1 and changed.exchanges(offer.steps) >= ENOUGH_EXCHANGES
        return {"sync": changed.model_dump(mode="json")} if possible else None

    return change


def _recompute(step: int) -> Change:
    order = ("none", "selective", "full")

    def change(held: CanonicalStrategy, offer: Offer) -> ChangedSetting | None:
        place = order.index(held.activation_checkpointing) + step
        return {"activation_checkpointing": order[place]} if 0 <= place < len(order) else None

    return change


RULES = (
    # gathers
    Rule(
        "gather one unit further ahead",
        "parameters arrive late: gather earlier",
        facts.gathers_exposed,
        _ahead(+1),
    ),
    Rule(
        "gather one unit less ahead",
        "units that wait hold memory: gather later",
        facts.full,
        _ahead(-1),
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
"""every action that the search may take"""
