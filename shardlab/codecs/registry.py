"""Construction of codecs from their specifications in `shardlab.strategy.codec_table`."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method, MultiPhaseMethod
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import parse_codec


def make_codec(spec: str | Mapping[str, Any] | CodecSpec) -> Codec:
    """Return the codec of `"int8:group=64"`, `{"name": "int8", "group": 64}` or a specification.

    Raises:
        UserError: As `make_method`; or the specification names a multi-phase method.
    """
    method = make_method(spec)
    if isinstance(method, MultiPhaseMethod):
        raise UserError(
            f"codec {method.name!r} needs several phases of messages: use it for the gradients of "
            "one level only"
        )
    return method


def make_method(spec: str | Mapping[str, Any] | CodecSpec) -> Method:
    """Return the codec, or a multi-phase method with empty state, of a specification.

    Raises:
        UserError: A name or option is unknown, or the factory does not fit the specification.
    """
    parsed = parse_codec(spec)
    factory = type(parsed).factory
    if not factory:
        raise UserError(f"codec {parsed.name!r}: set factory in {type(parsed).__name__}")
    try:
        make = resolve_name(factory) if isinstance(factory, str) else factory
        codec = make(**parsed.model_dump(exclude={"name"}))
    except TypeError as error:
        raise UserError(
            f"codec {parsed.name!r}: its factory must take the options of its spec: {error}"
        ) from error
    if not isinstance(codec, Codec | MultiPhaseMethod) or codec.name != parsed.name:
        raise UserError(
            f"codec {parsed.name!r}: its factory must make a shardlab.codecs.base.Codec of that "
            f"name (found {codec!r})"
        )
    return codec
