"""Base class of all documents that a user writes: strict and frozen."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, overload

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardlab.core.errors import UserError, nearest, shorten
from shardlab.core.files import read_json, write_json

AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Validator of tuple fields: YAML and JSON have lists, frozen documents have tuples."""

_SHOWN = 100
"""Characters of a wrong value that a message shows."""


class Document(BaseModel):
    """Frozen, strict document: it refuses unknown keys and wrong types, and converts nothing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """keys of these settings by the names that other libraries give them"""

    def __init__(self, /, **values: Any) -> None:
        """Validate the fields.

        Raises:
            UserError: A field is wrong, as in `validate`.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _one_line(error, type(self).__name__) from None

    # with this mark of pydantic's constructors inner documents are validated without a call of it
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_keys(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse unknown keys with a hint, together with the mistakes in all other keys."""
        fields = dict(value) if isinstance(value, dict) else {}
        unknown = [key for key in fields if key not in cls.model_fields]
        if not unknown:
            return handler(value)
        errors = [
            _error(f"unknown key; {cls._hint(str(key))}", (str(key),), value) for key in unknown
        ]
        try:
            handler({key: fields[key] for key in fields if key not in unknown})
        except ValidationError as error:
            errors += [_error(e["msg"], e["loc"], e["input"]) for e in error.errors()]
        raise ValidationError.from_exception_data(cls.__name__, errors)

    @classmethod
    def _hint(cls, key: str) -> str:
        if key in cls.elsewhere:
            return f"did you mean {cls.elsewhere[key]!r}?"
        return nearest(key, cls.model_fields)

    @classmethod
    def from_file(cls, path: str | Path, fix: str) -> Self:
        """Read the document that `to_file` wrote.

        Args:
            fix: What the user should do if the file is missing or damaged.

        Raises:
            UserError: The file is missing, damaged or not such a document.
        """
        value = read_json(path, fix)
        try:
            return validate(cls, value, str(path))
        except UserError as error:
            raise UserError(f"{error}: {fix}") from None

    def to_file(self, path: str | Path) -> None:
        """Write the document as JSON, atomically."""
        write_json(path, self.model_dump(mode="json"), allow_nan=True)


def _error(message: str, location: tuple[int | str, ...], value: Any) -> InitErrorDetails:
    # pydantic shows the message of a custom error unchanged
    kind = PydanticCustomError("mistake", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=value)


T = TypeVar("T")


@overload
def validate(annotation: type[T], value: Any, where: str, every: bool = False) -> T: ...
@overload
def validate(annotation: Any, value: Any, where: str, every: bool = False) -> Any: ...
def validate(annotation: Any, value: Any, where: str, every: bool = False) -> Any:
    """Validate `value` as an instance of `annotation`.

    Args:
        where: Name of the value, at the beginning of messages.
        every: Report all mistakes, one per line, in place of the first.

    Raises:
        UserError: One line with the path of the key, the expected value and the actual value.
    """
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        if every:
            raise UserError("\n".join(map(shorten, _lines(error, where)))) from None
        raise _one_line(error, where) from None


@cache  # to build the adapter of a union takes longer than to validate with it
def _adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(annotation)


def _one_line(error: ValidationError, where: str) -> UserError:
    first, *more = _lines(error, where)
    return UserError(first + (f"; {len(more)} more below it" if more else ""))


def _lines(error: ValidationError, where: str) -> list[str]:
    """Return a line for each mistake, with the path of its key, without pydantic's union tags.

    Of the alternatives of a union, only the first has a line.
    """
    lines: dict[tuple[int | str, ...], str] = {}
    for mistake in error.errors():
        location = mistake["loc"]
        union = next((i for i, part in enumerate(location) if _is_tag(part)), len(location))
        path = ".".join(filter(None, [where, *(str(p) for p in location if not _is_tag(p))]))
        value = mistake["input"]
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] in _EXPECTED:
            message = _EXPECTED[mistake["type"]].format(**mistake.get("ctx", {}))
            value = type(value) if isinstance(value, BaseModel) else value
        is_shown = isinstance(value, dict | list | BaseModel) or repr(value) in message
        shown = "" if is_shown else f" (found {_brief(value)})"
        lines.setdefault(location[:union], f"{path}: {message[0].lower()}{message[1:]}{shown}")
    return [*lines.values()]


_EXPECTED = {
    "model_type": "input should be a mapping or a {class_name}",
    "tuple_type": "input should be a list",
}
"""Messages in words of YAML that replace pydantic's, by its types of errors."""


def _brief(value: object) -> str:
    text = f"a {value.__name__}" if isinstance(value, type) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_tag(part: str | int) -> bool:
    """Return whether pydantic added this part of a location as the tag of a union."""
    return isinstance(part, str) and re.fullmatch(r"[\w-]+\[.*\]", part) is not None


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        leaves |= flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner}
    return leaves
