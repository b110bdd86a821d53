"""How a codec is named in a strategy: its name and options, as a mapping or as `name:key=value`."""

import re
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest
from shardlab.strategy.codec_options import (
    SPECS,
    Bf16Spec,
    Dynamic8Spec,
    EfSignSpec,
    Fp8Spec,
    Fp16Spec,
    GradiVeqSpec,
    Int4Spec,
    Int8Spec,
    NaturalSpec,
    NoneSpec,
    OneBitSpec,
    PowerSgdSpec,
    QsgdSpec,
    RandomKSpec,
    SignSpec,
    SketchSpec,
    ThresholdSpec,
    TopKSpec,
)

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _parse(value: Any) -> Any:
    """`"int8:group=64"` as `{"name": "int8", "group": 64}`; refuses names that are no codec."""
    if isinstance(value, str):
        value = split_text(value)
    name = _name(value)
    if name is None:
        raise PydanticCustomError(
            "no_codec", "a codec is its name, or a mapping with `name` and options"
        )
    if name not in SPECS:
        raise PydanticCustomError(
            "unknown_codec",
            "unknown codec {name}; {hint}",
            {"name": repr(name), "hint": nearest(str(name), SPECS)},
        )
    return value


def split_text(text: str) -> dict[str, Any]:
    """`"int8:group=64"` as `{"name": "int8", "group": 64}`; option values are YAML.

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
    # YAML 1.1 takes a number with an exponent for text unless it has a point and a sign
    if _EXPONENT.fullmatch(literal.strip()):
        return float(literal)
    return yaml.safe_load(literal)


def codec_text(codec: Document) -> str:
    """`"int8:group=64"`: the name, the first option, and all that are not at their default."""
    fields = [key for key in type(codec).model_fields if key != "name"]
    values = codec.model_dump()
    shown = [
        f"{key}={values[key]}"
        for key in fields
        if key == fields[0] or values[key] != type(codec).model_fields[key].default
    ]
    return f"{values['name']}:{','.join(shown)}" if shown else str(values["name"])


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, dict) else getattr(value, "name", None)


_Spec = Annotated[
    Annotated[NoneSpec, Tag("codec:none")]
    | Annotated[Fp16Spec, Tag("codec:fp16")]
    | Annotated[Bf16Spec, Tag("codec:bf16")]
    | Annotated[Fp8Spec, Tag("codec:fp8")]
    | Annotated[Int8Spec, Tag("codec:int8")]
    | Annotated[Int4Spec, Tag("codec:int4")]
    | Annotated[Dynamic8Spec, Tag("codec:dynamic8")]
    | Annotated[QsgdSpec, Tag("codec:qsgd")]
    | Annotated[NaturalSpec, Tag("codec:natural")]
    | Annotated[SignSpec, Tag("codec:sign")]
    | Annotated[EfSignSpec, Tag("codec:efsign")]
    | Annotated[OneBitSpec, Tag("codec:onebit")]
    | Annotated[TopKSpec, Tag("codec:topk")]
    | Annotated[RandomKSpec, Tag("codec:randomk")]
    | Annotated[ThresholdSpec, Tag("codec:threshold")]
    | Annotated[SketchSpec, Tag("codec:sketch")]
    | Annotated[GradiVeqSpec, Tag("codec:gradiveq")]
    | Annotated[PowerSgdSpec, Tag("codec:powersgd")],
    Discriminator(lambda value: f"codec:{_name(value)}"),
]
CodecSpec = Annotated[_Spec, BeforeValidator(_parse, json_schema_input_type=_Spec | str)]
