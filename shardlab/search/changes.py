"""Differences between two strategies, as data and in words.

A difference has three aspects: sharding, gradients and gathered weights.
"""

from typing import Any, NamedTuple

from shardlab.config.codec_table import codec_text
from shardlab.config.label import override_words
from shardlab.config.strategy import Strategy


class Change(NamedTuple):
    """One setting of the canonical form; codecs are written as `name:key=value`."""

    key: str
    before: Any
    after: Any


_WEIGHTS = {"weights", "weights_minimum_size"}


def changes(before: Strategy, after: Strategy) -> tuple[Change, ...]:
    """Return the settings that differ, in the order of their keys; empty for equal meanings."""
    old, new = _settings(before), _settings(after)
    return tuple(Change(key, old[key], new[key]) for key in sorted(old) if old[key] != new[key])


def aspects(found: tuple[Change, ...]) -> set[str]:
    """Return which of sharding, gradients and weights differ."""
    sharding = set(Strategy.model_fields) - {"gradients", "weights"}
    return {
        "sharding" if key in sharding else "weights" if key in _WEIGHTS else "gradients"
        for key, _, _ in found
    }


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
