"""Former arguments of `attach`, which are keys of `gradients`, `weights` and `sync` now."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardlab.core.errors import UserError
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
            codecs = dict(zip(("gradients", "weights"), args[1:], strict=False))
            new = ", ".join(f"{name}={value!r}" for name, value in _new(codecs | kwargs).items())
            raise UserError(f"attach: no argument {', '.join(former)}: write attach(model, {new})")
        return attach(*args, **kwargs)

    return run


def _new(former: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    new: dict[str, dict[str, Any]] = {}
    for name in ("gradients", "weights"):
        if (codec := former.get(name, "none")) != "none":
            new[name] = {"codec": codec}
    for argument in _NOW:
        if argument in former:
            name, key = _NOW[argument]
            value = former[argument]
            value = [value] if argument == "exclude" and isinstance(value, str) else value
            new.setdefault(name, {}).update({key: value} if key else value or {})
    return new
