"""Codecs made from their specifications in `shardlab.strategy.codec_table`."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import parse_codec


def make_codec(spec: str | Mapping[str, Any] | CodecSpec) -> Codec:
    """Return a codec from `"int8:group=64"`, `{"name": "int8", "group": 64}` or its specification.

    Raises:
        UserError: as `make_method`; or a method of several phases.
    """
    method = make_method(spec)
    if isinstance(method, MultiPhaseMethod):
        raise UserError(
            f"codec {method.name!r} needs several phases of messages: use it for the gradients of "
            "one level only"
        )
    return method


def make_method(spec: str | Mapping[str, Any] | CodecSpec) -> Method:
    """Return what a specification describes: a codec, or a method of several phases without state.

    Raises:
        UserError: unknown name or option, with the valid ones; a factory that does not fit.
    """
    checked = parse_codec(spec)
    factory = type(checked).factory
    if not factory:
        raise UserError(f"codec {checked.name!r}: set factory in {type(checked).__name__}")
    try:
        make = resolve_name(factory) if isinstance(factory, str) else factory
        codec = make(**checked.model_dump(exclude={"name"}))
    except TypeError as error:
        raise UserError(
            f"codec {checked.name!r}: its factory must take the options of its spec: {error}"
        ) from error
    if not isinstance(codec, Codec | MultiPhaseMethod) or codec.name != checked.name:
        raise UserError(
            f"codec {checked.name!r}: its factory must make a shardlab.codecs.base.Codec of that "
            f"name (found {codec!r})"
        )
    return codec
