"""Codecs made from their specifications in `shardlab.strategy.codec_table`."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import CODECS, AnyCodec


def make_codec(spec: str | Mapping[str, Any] | BaseModel | Method) -> Codec:
    """Return a codec from `"int8:group=64"`, `{"name": "int8", "group": 64}`, or a codec itself.

    Raises:
        UserError: unknown name or option, with the valid ones; a method of several phases.
    """
    method = make_method(spec)
    if isinstance(method, MultiPhaseMethod):
        raise UserError(
            f"codec {method.name!r} needs several phases of messages: use it for the gradients of "
            "one level only"
        )
    return method


def make_method(spec: str | Mapping[str, Any] | BaseModel | Method) -> Method:
    """Return what a spec describes: a codec, or a method of several phases without state.

    Raises:
        UserError: unknown name or option, with the valid ones; a factory that does not fit.
    """
    if isinstance(spec, Codec | MultiPhaseMethod):
        return spec
    checked = _checked(spec)
    options = checked.model_dump(exclude={"name"})
    try:
        made = _factory(type(checked))(**options)
    except TypeError as error:
        raise UserError(
            f"codec {checked.name!r}: its factory must take the options of its spec: {error}"
        ) from error
    if not isinstance(made, Codec | MultiPhaseMethod) or made.name != checked.name:
        raise UserError(
            f"codec {checked.name!r}: its factory must make a shardlab.codecs.base.Codec of that "
            f"name (found {made!r})"
        )
    return made


def spec_of(spec: str | Mapping[str, Any] | BaseModel | Method) -> CodecSpec:
    """Return the specification of a codec, by which its settings are validated.

    An object of a class that nobody registered gets one with the traits that the class declares.
    """
    if not isinstance(spec, Codec | MultiPhaseMethod):
        return _checked(spec)
    known = CODECS.get(spec.name)
    if known is not None and _factory(known) is type(spec):
        # the options were checked when the object was made, and may have become something else
        return known.model_construct(name=spec.name)

    class ObjectSpec(CodecSpec):
        summable = isinstance(spec, Codec) and spec.linear
        multi_phase = isinstance(spec, MultiPhaseMethod)

    return ObjectSpec(name=spec.name)


def _checked(spec: str | Mapping[str, Any] | BaseModel) -> CodecSpec:
    if not isinstance(spec, str | Mapping | BaseModel):
        raise UserError(f"codec: a codec is its name, or a mapping with `name` (found {spec!r})")
    if not isinstance(spec, str | CodecSpec):
        spec = spec.model_dump() if isinstance(spec, BaseModel) else dict(spec)
    checked: CodecSpec = validate(AnyCodec, spec, "codec")
    return checked


def _factory(spec: type[CodecSpec]) -> Any:
    return resolve_name(spec.factory) if isinstance(spec.factory, str) else spec.factory
