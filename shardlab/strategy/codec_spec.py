"""The base of codec specifications: a codec's name, options and traits, without torch."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from shardlab.core.document import Document
from shardlab.core.errors import UserError

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class CodecSpec(Document):
    """Name, options and traits of one codec.

    A subclass declares `name: Literal["int8"] = "int8"` and its options as fields, and its traits
    as class variables. Its docstring is the description that tables and judges show.
    `shardlab.strategy.codec_table` holds all of them.
    """

    name: str
    """as strategies write it"""

    factory: ClassVar[str | Callable[..., Any]] = ""
    """makes the codec from the options as keyword arguments. `"module:Class"` is imported when the
    first codec is made: stages that only read strategies start without torch"""
    examples: ClassVar[tuple[str, ...]] = ()
    """specs as text that the laws, the golden payloads and the benchmarks are run with"""
    summable: ClassVar[bool] = False
    """payloads can be summed on the wire, so that `route: native` is possible"""
    multi_phase: ClassVar[bool] = False
    """sums vectors in several collectives instead of one payload per message"""
    sparse: ClassVar[bool] = False
    """leaves elements out, so that it cannot serve parameters"""
    one_bit: ClassVar[bool] = False
    """has no code for zero"""
    needs_matrices: ClassVar[bool] = False
    """factors matrices and leaves flat vectors as they are"""

    def feedback_conflict(self) -> str | None:
        """Return why these options must not be combined with error feedback, with the fix."""
        return None


def codec_name(spec: type[CodecSpec]) -> str:
    """Return the name that a class of specs declares."""
    return str(spec.model_fields["name"].default)


def split_text(text: str) -> dict[str, Any]:
    """Return `"int8:group=64"` as `{"name": "int8", "group": 64}`; option values are YAML.

    `1e-3` and `1e5` are numbers here, as everywhere but in YAML 1.1.

    Raises:
        UserError: an option that is not `key=value`.
    """
    name, _, options = text.partition(":")
    parsed: dict[str, Any] = {"name": name}
    for option in filter(None, options.split(",")):
        key, equals, literal = option.partition("=")
        if not equals:
            raise UserError(f"codec option {option!r} is not key=value")
        parsed[key] = _value(literal)
    return parsed


def _value(literal: str) -> Any:
    # YAML 1.1 reads a number with an exponent as text unless it has a point and a sign
    if _EXPONENT.fullmatch(literal.strip()):
        return float(literal)
    return yaml.safe_load(literal)


def codec_text(codec: CodecSpec) -> str:
    """Return `"int8:group=64"`: the name, the first option, and all that are not the default."""
    fields = [key for key in type(codec).model_fields if key != "name"]
    values = codec.model_dump()
    shown = [
        f"{key}={values[key]}"
        for key in fields
        if key == fields[0] or values[key] != type(codec).model_fields[key].default
    ]
    return f"{codec.name}:{','.join(shown)}" if shown else codec.name
