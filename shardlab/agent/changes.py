"""The settings in which two strategies differ, as data and in words."""

from typing import Any, NamedTuple

from shardlab.core.strategy import Strategy

SHARDING = {"engine", "wrap", "reshard_after_forward", "bucket_mb"}
"""settings of the model's distribution; all others say how gradients travel"""


class Change(NamedTuple):
    """One setting of the normal form; codecs are given as `name:key=value`."""

    key: str
    before: Any
    after: Any


def changes(before: Strategy, after: Strategy) -> tuple[Change, ...]:
    """The differing settings, in the order of their keys; empty for equal meanings."""
    old, new = _settings(before), _settings(after)
    return tuple(Change(key, old[key], new[key]) for key in sorted(old) if old[key] != new[key])


def in_words(found: tuple[Change, ...]) -> str:
    """`engine: fsdp2 to ddp; wrap: block to unset`."""
    return "; ".join(f"{key}: {_word(old)} to {_word(new)}" for key, old, new in found)


def _settings(strategy: Strategy) -> dict[str, Any]:
    """The normal form in one level; a codec and its options are one setting."""
    form = strategy.normal().model_dump(mode="json")
    gradients = form.pop("gradients")
    codec = gradients.pop("codec")
    name = codec.pop("name")
    options = ",".join(f"{key}={value}" for key, value in sorted(codec.items()))
    return {
        **form,
        "codec": f"{name}:{options}" if options else name,
        **gradients,
    }


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
