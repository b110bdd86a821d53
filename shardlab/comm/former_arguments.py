"""Former arguments of `attach`, which are keys of `gradients`, `weights` and `sync` now."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.compression import Compression

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOW = {
    **{key: ("gradients", key) for key in Compression.model_fields if key != "codec"},
    "weights_minimum_size": ("weights", "minimum_size"),
    "sync_every": ("sync", "every"),
    "outer": ("sync", ""),
}
"""argument and key of it that a former argument has become; without a key: more of its keys"""


def answering_former(attach: Callable[_P, _R]) -> Callable[_P, _R]:
    """Answer a call with former arguments by the call to write."""

    @wraps(attach)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if former := [name for name in kwargs if name in _NOW]:
            codecs = dict(zip(("gradients", "weights", "sync"), args[1:], strict=False))
            new = ", ".join(f"{name}={value!r}" for name, value in _new(codecs | kwargs).items())
            raise UserError(f"attach: no argument {', '.join(former)}: write attach(model, {new})")
        return attach(*args, **kwargs)

    return run


def _new(former: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    new: dict[str, dict[str, Any]] = {}
    for name in ("gradients", "weights", "sync"):
        if (settings := former.get(name) or "none") != "none":
            new[name] = _as_mapping(settings)
    for argument in _NOW:
        if argument in former:
            name, key = _NOW[argument]
            value = former[argument]
            value = [value] if argument == "exclude" and isinstance(value, str) else value
            new.setdefault(name, {}).update({key: value} if key else value or {})
    return new


def _as_mapping(settings: Any) -> dict[str, Any]:
    """Return what an argument says, by its keys."""
    if isinstance(settings, Document) and not isinstance(settings, CodecSpec):
        return {key: getattr(settings, key) for key in sorted(settings.model_fields_set)}
    return dict(settings) if isinstance(settings, Mapping) else {"codec": settings}
