"""Settings of a strategy in words, from its schema, for the prompt of a judge."""

from collections.abc import Iterator
from typing import Any

from shardlab.strategy.codec_table import all_specs
from shardlab.strategy.strategy import Strategy

Schema = dict[str, Any]

_TYPES = {"null": "unset", "boolean": "true, false", "array": "list"}


def settings_in_words() -> str:
    """Return one line per setting with its values and meaning, then one per codec with its options.

    `gradients.residual: fp32, bf16, int8. type in which error feedback stores residuals`
    """
    schema = Strategy.model_json_schema()
    codecs = [_codec(name, spec.model_json_schema()) for name, spec in all_specs().items()]
    return "\n".join(["Settings:", *_settings(schema, schema["$defs"]), "Codecs:", *codecs])


def _settings(schema: Schema, definitions: dict[str, Schema], path: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        listed = "$ref" in field.get("items", {})
        kinds = [field["items"]] if listed else _kinds(field)
        nested = next((each["$ref"] for each in kinds if "$ref" in each), None)
        if nested is not None:
            definition = definitions[nested.rpartition("/")[2]]
            yield from _settings(definition, definitions, f"{path}{name}{'[]' * listed}.")
        else:
            meaning = " ".join(field.get("description", "").split())
            yield f"{path}{name}: {'. '.join(filter(None, [_values(field), meaning]))}"


def _codec(name: str, schema: Schema) -> str:
    options = [
        f"{key} ({_values(field)})" for key, field in schema["properties"].items() if key != "name"
    ]
    return f"{name}: {' '.join(filter(None, [schema['description'], ', '.join(options)]))}"


def _kinds(field: Schema) -> list[Schema]:
    found: list[Schema] = field.get("anyOf", [field])
    found = [kind for each in found for kind in each.get("anyOf", [each])]
    # a codec may also be written as text, or be registered by the user
    coded = any("oneOf" in kind for kind in found)
    return [kind for kind in found if not (coded and kind.get("type") in ("string", "object"))]


def _values(field: Schema) -> str:
    """Return the values as `block, root, unset`."""
    return ", ".join(_value(kind) for kind in _kinds(field))


def _value(kind: Schema) -> str:
    if "enum" in kind:
        return ", ".join(map(str, kind["enum"]))
    name = str(kind.get("type"))
    return "a codec" if "oneOf" in kind else _TYPES.get(name, name)
