"""Overrides: settings of some layers of a model that differ from those of the strategy."""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from shardlab.core.document import AS_TUPLE, Document

DType = Literal["auto", "fp32", "bf16", "fp16"]
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Checkpointing = Literal["none", "selective", "full"]

Reshard = Annotated[
    bool | Annotated[int, Field(ge=1)],
    # over groups of one rank every parameter is whole
    AfterValidator(lambda value: False if value is not True and value == 1 else value),
]

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
    ]
}


def _numbers(value: Any) -> Any:
    """Return `"0-2,7"`, `7` or `[0, "1-2", 7]` as sorted numbers without repetition."""
    if isinstance(value, list | tuple):
        return tuple(sorted({number for each in value for number in _numbers(each)}))
    parts = [part.strip() for part in str(value).split(",")]
    found = [_RANGE.fullmatch(part) for part in parts]
    if isinstance(value, bool) or not all(found):
        raise PydanticCustomError("layers", "expected layers such as 3, '0-3' or '0-2,7'")
    ends = [(int(match[1]), int(match[2] or match[1])) for match in found if match]
    return tuple(sorted({n for first, last in ends for n in range(first, last + 1)}))


class Override(Document):
    """Settings for some layers, or for one of the two modules around them."""

    layers: (
        Annotated[tuple[int, ...], BeforeValidator(_numbers), WithJsonSchema(_SCHEMA)] | None
    ) = Field(None, min_length=1)
    """numbers of transformer blocks from 0, as in `0-3`, `7` or `[0, 7]`"""
    module: Literal["embedding", "head"] | None = None
    """fsdp2, manual: the token embedding or the output head becomes a unit; where they share their
    weight they become one unit"""
    reshard_after_forward: Reshard | None = None
    """in place of the setting of the strategy"""
    param_dtype: DType | None = None
    """in place of the setting of the strategy"""
    activation_checkpointing: Checkpointing | None = None
    """in place of the setting of the strategy"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.layers is None) == (self.module is None):
            raise ValueError("give either layers or module")
        if self.layers is not None and not self.settings():
            raise ValueError(f"nothing is set for layers {ranges(self.layers)}: remove it")
        if self.module is not None and self.activation_checkpointing is not None:
            raise ValueError("activation_checkpointing is for layers: remove it")
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that are given."""
        values = {key: getattr(self, key) for key in SETTINGS}
        return {key: value for key, value in values.items() if value is not None}


SETTINGS = ("reshard_after_forward", "param_dtype", "activation_checkpointing")

Overrides = Annotated[tuple[Override, ...], AS_TUPLE]


def canonical_overrides(
    overrides: Iterable[Override], own: Mapping[str, Any]
) -> tuple[Override, ...]:
    """Return one override per combination of settings, without those that change nothing.

    Later overrides win.

    Args:
        own: settings of the strategy.
    """
    layers: dict[int, dict[str, Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    for override in overrides:
        settings = override.settings()
        if override.module is not None:
            modules.setdefault(override.module, {}).update(settings)
        for layer in override.layers or ():
            layers.setdefault(layer, {}).update(settings)
    merged: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for layer in sorted(layers):
        changed = _changed(layers[layer], own)
        if changed:
            merged.setdefault(tuple(changed.items()), []).append(layer)
    return (
        *(Override(layers=tuple(where), **dict(what)) for what, where in merged.items()),
        *(Override(module=name, **_changed(modules[name], own)) for name in sorted(modules)),  # type: ignore[arg-type]
    )


def _changed(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    known = ((key, settings[key]) for key in SETTINGS if key in settings)
    return {key: value for key, value in known if value != own[key]}


def ranges(layers: Iterable[int]) -> str:
    """Return the text of sorted layer numbers, such as `0-2,7`."""
    numbers = list(layers)
    starts = [n for before, n in pairwise([-2, *numbers]) if n != before + 1]
    ends = [n for n, after in pairwise([*numbers, numbers[-1] + 2]) if after != n + 1]
    return ",".join(
        str(first) if first == last else f"{first}-{last}"
        for first, last in zip(starts, ends, strict=True)
    )
