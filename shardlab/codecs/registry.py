"""Codecs by name, with the built-in ones and those that a user adds."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from shardlab.codecs.base import Codec
from shardlab.codecs.casts import BFloat16, Float16
from shardlab.codecs.dynamic import Dynamic8
from shardlab.codecs.floats import Fp8
from shardlab.codecs.gradiveq import GradiVeQ
from shardlab.codecs.identity import Identity
from shardlab.codecs.integers import Int4, Int8
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.natural import Natural
from shardlab.codecs.powersgd import PowerSgd
from shardlab.codecs.qsgd import Qsgd
from shardlab.codecs.randomk import RandomK
from shardlab.codecs.signs import EfSign, OneBit, Sign
from shardlab.codecs.sketch import Sketch
from shardlab.codecs.sparse import Threshold, TopK
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest
from shardlab.strategy.codec_spec import CodecSpec, split_text

_BUILT_IN: dict[str, Callable[..., Codec]] = {
    codec.name: codec
    for codec in (
        Identity,
        Float16,
        BFloat16,
        Fp8,
        Int8,
        Int4,
        Dynamic8,
        Qsgd,
        Natural,
        Sign,
        EfSign,
        OneBit,
        TopK,
        RandomK,
        Threshold,
    )
}
_MULTI_PHASE: dict[str, Callable[..., MultiPhaseMethod]] = {
    method.name: method for method in (Sketch, GradiVeQ, PowerSgd)
}
_ADDED: dict[str, Callable[..., Codec]] = {}


def register(name: str, factory: Callable[..., Codec]) -> None:
    """Makes `factory(**options)` known as `name` to `make_codec`.

    Raises:
        UserError: the name is taken.
    """
    if name in _BUILT_IN or name in _MULTI_PHASE or name in _ADDED:
        raise UserError(f"codec {name!r} exists already: choose another name")
    _ADDED[name] = factory


def make_codec(spec: str | Mapping[str, Any] | BaseModel | Codec | MultiPhaseMethod) -> Codec:
    """A codec from `"int8:group=64"`, `{"name": "int8", "group": 64}`, or a codec itself.

    Raises:
        UserError: unknown name or option, with the valid ones; a method of several rounds.
    """
    method = make_method(spec)
    if isinstance(method, MultiPhaseMethod):
        raise UserError(
            f"codec {method.name!r} takes several rounds of messages: it serves the gradients of "
            "one level only"
        )
    return method


def make_method(
    spec: str | Mapping[str, Any] | BaseModel | Codec | MultiPhaseMethod,
) -> Codec | MultiPhaseMethod:
    """The same for all methods: codecs, and those that take several rounds of messages.

    Raises:
        UserError: unknown name or option, with the valid ones.
    """
    if isinstance(spec, Codec | MultiPhaseMethod):
        return spec
    if not isinstance(spec, str | Mapping | BaseModel):
        raise UserError(f"codec: a codec is its name, or a mapping with `name` (found {spec!r})")
    given = spec.model_dump() if isinstance(spec, BaseModel) else spec
    options = dict(split_text(given) if isinstance(given, str) else given)
    name = options.get("name")
    if name in _ADDED:
        return _make_added(options)
    known: dict[str, Callable[..., Codec | MultiPhaseMethod]] = {**_BUILT_IN, **_MULTI_PHASE}
    if name not in known:
        raise UserError(f"unknown codec {name!r}; {nearest(str(name), {**known, **_ADDED})}")
    checked = validate(CodecSpec, options, "codec").model_dump()
    return known[checked.pop("name")](**checked)


def _make_added(options: dict[str, Any]) -> Codec:
    name = options.pop("name")
    try:
        return _ADDED[name](**options)
    except TypeError as error:
        raise UserError(f"codec {name!r}: {error}") from None
