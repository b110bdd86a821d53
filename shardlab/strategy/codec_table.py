"""Codecs that a strategy may name: built-in ones, and those that modules of users register."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union

import yaml
from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema
from pydantic_core import PydanticCustomError

from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest
from shardlab.strategy import codec_options
from shardlab.strategy.codec_options import CodecSpec

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def codec_name(spec: type[CodecSpec]) -> str:
    """Return the name that a class of specs declares."""
    return str(spec.model_fields["name"].default)


BUILT_IN: Mapping[str, type[CodecSpec]] = {
    codec_name(spec): spec
    for spec in vars(codec_options).values()
    if isinstance(spec, type) and issubclass(spec, CodecSpec) and spec is not CodecSpec
}
CODECS = dict(BUILT_IN)
"""of all codecs by name: built-in and registered"""
_ELSEWHERE = {
    "bfloat16": "bf16",
    "dgc": "topk",
    "float16": "fp16",
    "fp32": "none",
    "half": "fp16",
    "identity": "none",
    "nc": "natural",
    "signsgd": "sign",
    "terngrad": "qsgd:levels=1",
    "thresholdv": "threshold:threshold=0.001",
}
"""codecs by names that papers and other libraries give them, and that are none of ours"""


def register(name: str, spec: type[CodecSpec], factory: str | Callable[..., Any]) -> None:
    """Add a codec, which `attach`, `params.yaml` and the benchmarks then know as `name`.

    Args:
        spec: a class derived from `CodecSpec` with the field `name: Literal[NAME] = NAME`, the
            options as further fields, and the traits that differ from `CodecSpec`.
        factory: makes a `shardlab.codecs.base.Codec` (or a `MultiPhaseMethod`) from the options as
            keyword arguments; or `"module:Class"`, imported when the first codec is made.

    Raises:
        UserError: the name is taken or does not fit the spec.
    """
    if name in CODECS:
        raise UserError(f"codec {name!r} exists already: choose another name")
    if not _NAME.fullmatch(name):
        raise UserError(f"codec {name!r}: names are lower-case letters, digits, - and _")
    if not (isinstance(spec, type) and issubclass(spec, CodecSpec)):
        raise UserError(
            f"codec {name!r}: the spec must be a class derived from shardlab.CodecSpec "
            f"(found {spec!r})"
        )
    if codec_name(spec) != name:
        raise UserError(
            f'codec {name!r}: {spec.__name__} needs the field name: Literal["{name}"] = "{name}"'
        )
    spec.factory = factory
    CODECS[name] = spec


def _parse(value: Any) -> CodecSpec:
    """Return the validated spec of `"int8:group=64"` or `{"name": "int8", "group": 64}`."""
    if isinstance(value, CodecSpec):
        return value
    if isinstance(value, str):
        value = split_text(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError(
            "no_codec", "a codec is its name with options, a mapping with `name`, or its CodecSpec"
        )
    spec = CODECS.get(name)
    if spec is None:
        hint = nearest(name, CODECS)
        if name in _ELSEWHERE:
            hint = f"did you mean {_ELSEWHERE[name]!r}?"
        elif not get_close_matches(name, CODECS, cutoff=0.7):  # more than a slip of the pen
            hint += "; if it is your own, import its module first (params.yaml: `codecs`)"
        raise PydanticCustomError(
            "unknown_codec", "unknown codec {name}; {hint}", {"name": repr(name), "hint": hint}
        )
    return spec.model_validate(value)


def split_text(text: str) -> dict[str, Any]:
    """Return `"int8:group=64"` as `{"name": "int8", "group": 64}`; option values are YAML.

    `1e-3` and `1e5` are numbers here, as everywhere but in YAML 1.1.

    Raises:
        UserError: an option that is not `key=value`, or whose value is not YAML.
    """
    name, _, options = text.partition(":")
    parsed: dict[str, Any] = {"name": name}
    for option in filter(None, options.split(",")):
        key, equals, literal = option.partition("=")
        if not equals:
            raise UserError(f"codec option {option!r} is not key=value")
        try:
            # YAML 1.1 reads a number with an exponent as text unless it has a point and a sign
            is_number = _EXPONENT.fullmatch(literal.strip())
            parsed[key] = float(literal) if is_number else yaml.safe_load(literal)
        except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: the 40th of a month
            raise UserError(f"codec option {option!r}: its value is not YAML") from None
    return parsed


def codec_text(codec: CodecSpec) -> str:
    """Return `"int8:group=64"`: the name, the first option, and all that are not the default."""
    fields = [key for key in type(codec).model_fields if key != "name"]
    values = codec.model_dump()
    shown = [
        f"{key}={values[key]}"
        for key in fields
        if key in values
        and (key == fields[0] or values[key] != type(codec).model_fields[key].default)
    ]
    return f"{codec.name}:{','.join(shown)}" if shown else codec.name


# for editors: the built-in specs with their options, other names, and text
_BuiltIn: Any = Annotated[Union[tuple(BUILT_IN.values())], Field(discriminator="name")]  # noqa: UP007
_Other = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "a codec that a module of `codecs` registers",
            "properties": {"name": {"type": "string", "not": {"enum": list(BUILT_IN)}}},
            "required": ["name"],
        }
    ),
]
AnyCodec = Annotated[
    SerializeAsAny[CodecSpec],
    BeforeValidator(_parse, json_schema_input_type=_BuiltIn | _Other | str),
]
"""a field that holds any codec of the table"""


def parse_codec(value: str | Mapping[str, Any] | CodecSpec, where: str = "codec") -> CodecSpec:
    """Return the specification of a codec from its text, its mapping or itself.

    Raises:
        UserError: unknown name or option, with the valid ones.
    """
    if isinstance(value, CodecSpec):
        return value
    plain = dict(value) if isinstance(value, Mapping) else value
    codec: CodecSpec = validate(AnyCodec, plain, where)
    return codec


FOLDER = "user_codecs"
"""of the experiment, with the modules of `codecs`: the stages that run codecs depend on it"""


def load_codecs(entries: Iterable[str], where: str = "codecs") -> None:
    """Import modules that register codecs: `user_codecs.ternary`, or `user_codecs/ternary.py`.

    Names are resolved from the working directory, which is the experiment's folder, and then among
    installed packages. A module is imported once in a process; rank processes that are forked
    inherit it, and those that torchrun starts read the parameters again.

    Args:
        where: named in errors.

    Raises:
        UserError: a module that is missing, fails, registers nothing or a name that is taken.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        # at the end: nothing in the experiment's folder may hide an installed module
        sys.path.append(here)
    for i, entry in enumerate(entries):
        _load_module(entry, f"{where}.{i}")


def _load_module(entry: str, where: str) -> None:
    name = entry.removesuffix(".py").replace("/", ".")
    before = dict(CODECS)
    try:
        module = import_module(name)
    except UserError as error:
        raise UserError(f"{where}: {entry}: {error}") from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failure(error, entry, where) from error
        known = [f"{FOLDER}.{path.stem}" for path in sorted(Path(FOLDER).glob("*.py"))]
        hint = nearest(name, known) if known else f"create {FOLDER}/NAME.py and list {FOLDER}.NAME"
        raise UserError(f"{where}: no module {entry!r}; {hint}") from None
    except Exception as error:
        raise _failure(error, entry, where) from error
    _check_folder(module, entry, where)
    new = CODECS.keys() - before.keys()
    # a module that was imported before has registered its codecs then
    if not new and not any(spec.__module__ == name for spec in before.values()):
        raise UserError(
            f"{where}: {entry} registers no codec: call shardlab.register(name, spec, factory) "
            "in it"
        )


def _failure(error: Exception, entry: str, where: str) -> UserError:
    words = " ".join(str(error).split())
    return UserError(
        f"{where}: {entry} cannot be imported: {type(error).__name__}: {words}: fix it"
    )


def _check_folder(module: ModuleType, entry: str, where: str) -> None:
    """Refuse a file of the experiment that no stage depends on: its edits would repeat nothing."""
    file, here = Path(module.__file__ or "").resolve(), Path.cwd().resolve()
    installed = "site-packages" in file.parts
    if file.is_relative_to(here) and not file.is_relative_to(here / FOLDER) and not installed:
        raise UserError(
            f"{where}: {entry} lies outside {FOLDER}/, the folder that the stages depend on: move "
            f"{file.relative_to(here)} there"
        )
