"""Codecs by name, with the built-in ones and those that a user adds."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from shardlab.codecs.base import Codec
from shardlab.codecs.casts import BFloat16
from shardlab.codecs.identity import Identity
from shardlab.codecs.integers import Int4, Int8
from shardlab.codecs.qsgd import Qsgd
from shardlab.codecs.sparse import TopK
from shardlab.core.codec_spec import CodecSpec, split_text
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest

_BUILT_IN: dict[str, Callable[..., Codec]] = {
    codec.name: codec
    for codec in (
        Identity,
        BFloat16,
        Int8,
        Int4,
        Qsgd,
        TopK,
    )
}
_ADDED: dict[str, Callable[..., Codec]] = {}


def register(name: str, factory: Callable[..., Codec]) -> None:
    """Makes `factory(**options)` known as `name` to `make_codec`.

    Raises:
        UserError: the name is taken.
    """
    if name in _BUILT_IN or name in _ADDED:
        raise UserError(f"codec {name!r} exists already: choose another name")
    _ADDED[name] = factory


def make_codec(spec: str | Mapping[str, Any] | BaseModel | Codec) -> Codec:
    """A codec from `"int8:group=64"`, `{"name": "int8", "group": 64}`, or a codec itself.

    Raises:
        UserError: unknown name or option, with the valid ones.
    """
    if isinstance(spec, Codec):
        return spec
    given = spec.model_dump() if isinstance(spec, BaseModel) else spec
    options = dict(split_text(given) if isinstance(given, str) else given)
    name = options.get("name")
    if name in _ADDED:
        return _make_added(options)
    if name not in _BUILT_IN:
        raise UserError(f"unknown codec {name!r}; {nearest(str(name), {**_BUILT_IN, **_ADDED})}")
    checked = validate(CodecSpec, options, "codec").model_dump()
    return _BUILT_IN[checked.pop("name")](**checked)


def _make_added(options: dict[str, Any]) -> Codec:
    name = options.pop("name")
    try:
        return _ADDED[name](**options)
    except TypeError as error:
        raise UserError(f"codec {name!r}: {error}") from None
