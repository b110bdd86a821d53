"""Base class of everything that a user writes: strict, frozen documents."""

from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from shardlab.core.errors import UserError, nearest
from shardlab.core.files import read_json, write_json

AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""for fields that are tuples, as frozen documents have them, where YAML and JSON have lists"""


_SHOWN = 100
"""characters of a wrong value in a message"""


class Document(BaseModel):
    """Frozen and strict: unknown keys and wrong types are refused, never converted."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key; {hint}",
                        {"key": str(key), "hint": nearest(str(key), cls.model_fields)},
                    )
        return value

    @classmethod
    def from_file(cls, path: str | Path, fix: str) -> Self:
        """Read the document that `to_file` wrote.

        Args:
            fix: what the user should do when the file is missing or damaged.

        Raises:
            UserError: it is, or it holds something else.
        """
        try:
            return validate(cls, read_json(path, fix), str(path))
        except UserError as error:
            raise UserError(f"{error}: {fix}") from None

    def to_file(self, path: str | Path) -> None:
        """Write the document as JSON, atomically."""
        write_json(path, self.model_dump(mode="json"), allow_nan=True)


T = TypeVar("T")


@overload
def validate(annotation: type[T], value: Any, where: str) -> T: ...
@overload
def validate(annotation: Any, value: Any, where: str) -> Any: ...
def validate(annotation: Any, value: Any, where: str) -> Any:
    """Validate `value` as an instance of `annotation`.

    Raises:
        UserError: one line with the key's path, what was expected and what was found.
    """
    try:
        return _adapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        raise UserError(_one_line(error, where)) from None


@cache  # to build that of a union takes longer than to validate with it
def _adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(annotation)


def _one_line(error: pydantic.ValidationError, where: str) -> str:
    """Return the first error, addressed by the path that the user wrote (without union tags)."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"] if not _is_tag(part)]
    unknown = first.get("ctx", {}).get("key") if first["type"] == "unknown_key" else None
    path = ".".join([*filter(None, [where]), *parts, *filter(None, [unknown])])
    found = first["input"]
    shown = "" if isinstance(found, dict | list | BaseModel) else f" (found {_brief(found)})"
    more = error.error_count() - 1
    rest = f"; {more} more below it" if more else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower()}{message[1:]}{shown}{rest}"


def _brief(found: object) -> str:
    text = repr(found)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_tag(part: str | int) -> bool:
    """Return whether a validator put this part into the location: no user wrote it."""
    return isinstance(part, str) and "[" in part


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        leaves |= flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner}
    return leaves
