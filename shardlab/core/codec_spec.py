"""How a codec is named in a strategy: its name and options, as a mapping or as `name:key=value`.

The algorithms live in `shardlab.codecs`; their options live here, so that a strategy can be
checked, normalised and hashed without importing torch.
"""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest


class NoneSpec(Document):
    """No compression: float32 as it is."""

    name: Literal["none"] = "none"


class Bf16Spec(Document):
    """Rounded to bfloat16."""

    name: Literal["bf16"] = "bf16"


class Int8Spec(Document):
    """Eight-bit integers with one scale per group."""

    name: Literal["int8"] = "int8"
    group: int = Field(128, ge=8, le=4096, multiple_of=8)
    """elements that share one scale"""


class TopKSpec(Document):
    """The largest elements by magnitude."""

    name: Literal["topk"] = "topk"
    density: float = Field(0.01, gt=0, le=1)
    """share of the elements that is sent"""


_SPECS: dict[str, type[Document]] = {
    "none": NoneSpec,
    "bf16": Bf16Spec,
    "int8": Int8Spec,
    "topk": TopKSpec,
}


def _parse(value: Any) -> Any:
    """`"int8:group=64"` as `{"name": "int8", "group": 64}`; refuses names that are no codec."""
    if isinstance(value, str):
        value = split_text(value)
    name = _name(value)
    if name not in _SPECS:
        raise PydanticCustomError(
            "unknown_codec",
            "unknown codec {name}; {hint}",
            {"name": repr(name), "hint": nearest(str(name), _SPECS)},
        )
    return value


def split_text(text: str) -> dict[str, Any]:
    """`"int8:group=64"` as `{"name": "int8", "group": 64}`; option values are YAML.

    Raises:
        UserError: an option that is not `key=value`.
    """
    name, _, options = text.partition(":")
    parsed: dict[str, Any] = {"name": name}
    for option in filter(None, options.split(",")):
        key, equals, literal = option.partition("=")
        if not equals:
            raise UserError(f"codec option {option!r} is not key=value")
        parsed[key] = yaml.safe_load(literal)
    return parsed


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, dict) else getattr(value, "name", None)


_Spec = Annotated[
    Annotated[NoneSpec, Tag("codec:none")]
    | Annotated[Bf16Spec, Tag("codec:bf16")]
    | Annotated[Int8Spec, Tag("codec:int8")]
    | Annotated[TopKSpec, Tag("codec:topk")],
    Discriminator(lambda value: f"codec:{_name(value)}"),
]
CodecSpec = Annotated[_Spec, BeforeValidator(_parse, json_schema_input_type=_Spec | str)]
