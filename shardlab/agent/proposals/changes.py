"""Differences between two strategies, as data and in words."""

from typing import Any, NamedTuple

from shardlab.strategy.codec_spec import codec_text
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
