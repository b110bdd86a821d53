"""Differences between two strategies, as data and in words, and their measured effects.

A difference has three aspects, sharding, gradients and gathered weights, whose effects are looked
up separately. Codecs of different names are compared by these names: what int8 did with groups of
128 is what is expected of it with groups of 512.
"""

import math
from typing import Any, NamedTuple

from shardlab.agent.records.history import History
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.label import override_words
from shardlab.strategy.strategy import Strategy

SHARDING = set(Strategy.model_fields) - {"gradients", "weights"}
"""settings of how the model is sharded; all others are about messages"""


class Change(NamedTuple):
    """One setting of the canonical form; codecs are written as `name:key=value`."""

    key: str
    before: Any
    after: Any


def changes(before: Strategy, after: Strategy) -> tuple[Change, ...]:
    """Return the settings that differ, in the order of their keys; empty for equal meanings."""
    old, new = _settings(before), _settings(after)
    return tuple(Change(key, old[key], new[key]) for key in sorted(old) if old[key] != new[key])


def in_words(found: tuple[Change, ...]) -> str:
    """Return `engine: fsdp2 to ddp; wrap: block to unset`."""
    return "; ".join(f"{key}: {_word(old)} to {_word(new)}" for key, old, new in found)


def _settings(strategy: Strategy) -> dict[str, Any]:
    """Flatten the canonical form to one level; a codec with its options is one setting."""
    normal = strategy.canonical()
    form = normal.model_dump(mode="json", exclude={"gradients", "weights", "overrides"})
    gradients, weights = normal.gradients, normal.weights
    between = gradients.between_nodes
    return {
        **form,
        "overrides": "; ".join(override_words(each) for each in normal.overrides) or None,
        "weights": codec_text(weights.codec) if weights else "none",
        "weights_minimum_size": weights and weights.minimum_size,
        **gradients.model_dump(mode="json"),
        "codec": codec_text(gradients.codec),
        "between_nodes": between and codec_text(between),
    }


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Effect(NamedTuple):
    """Effect of a change: logarithms of the ratios, after over before."""

    log_step: float
    log_perplexity: float

    def is_gain(self, tolerance: float) -> bool:
        """Whether it is faster and within the tolerated relative rise of perplexity."""
        return self.log_step < 0 and self.log_perplexity <= math.log1p(tolerance)


Aspects = tuple[tuple[Change, ...], ...]
"""a difference split into its aspects; one without a change is left out"""

_BESIDE_CODEC = ("error_feedback", "between_nodes")
_WEIGHTS = ("weights", "weights_minimum_size")


def measured_effects(history: History) -> dict[tuple[Change, ...], Effect]:
    """Return the mean effect of each change that alone separates two measured strategies."""
    seen: dict[tuple[Change, ...], list[Effect]] = {}
    entries = history.succeeded()
    for before in entries:
        for after in entries:
            aspects = _aspects(changes(before.strategy, after.strategy))
            if len(aspects) == 1:
                step, quality = (
                    math.log(after.mean(field) / before.mean(field))
                    for field in ("step_ms_p50", "val_ppl")
                )
                seen.setdefault(aspects[0], []).append(Effect(step, quality))
    return {
        aspect: Effect(*(sum(column) / len(found) for column in zip(*found, strict=True)))
        for aspect, found in seen.items()
    }


def expected_effect(
    found: tuple[Change, ...], effects: dict[tuple[Change, ...], Effect]
) -> Effect | None:
    """Sum the effects of the measured aspects of a difference; None when none was measured."""
    known = [effects[aspect] for aspect in _aspects(found) if aspect in effects]
    if not known:
        return None
    return Effect(*(sum(column) for column in zip(*known, strict=True)))


def _aspects(found: tuple[Change, ...]) -> Aspects:
    sharding = tuple(change for change in found if change.key in SHARDING)
    weights = tuple(change for change in found if change.key in _WEIGHTS)
    gradients = tuple(change for change in found if change not in (*sharding, *weights))
    aspects = (
        sharding,
        _by_codec_names(gradients, "codec", _BESIDE_CODEC),
        _by_codec_names(weights, "weights", ()),
    )
    return tuple(aspect for aspect in aspects if aspect)


def _by_codec_names(
    found: tuple[Change, ...], key: str, with_keys: tuple[str, ...]
) -> tuple[Change, ...]:
    """Return, where the name of a codec changes, that change and those of the given keys alone."""
    codec = next((change for change in found if change.key == key), None)
    if codec is None:
        return found
    before, after = (text.partition(":")[0] for text in codec[1:])
    if before == after:
        return found
    return (Change(key, before, after), *(each for each in found if each.key in with_keys))
