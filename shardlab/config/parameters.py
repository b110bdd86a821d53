"""Reading of parameters: files, overrides from the command line, and single sections."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from shardlab.config.canonical import canonical
from shardlab.config.experiment import REQUIRED, Modules, Params
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest, shorten
from shardlab.strategy.codec_table import load_codecs
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.strategy.validation import check_optimizer


class Parameters:
    """The parameters in a file, possibly a part of them, with overrides from the command line.

    Args:
        path: YAML, or JSON in a file named so.
        overrides: `key=value` texts, keys dotted and values in YAML or JSON, applied before the
            checks.

    Raises:
        UserError: a line for each mistake in the sections, and where there is none for each in what
            they say of others.
    """

    def __init__(self, path: str | Path = "params.yaml", overrides: Iterable[str] = ()) -> None:
        self._path = path
        tree = read_tree(path)
        try:
            for override in overrides:
                _override(tree, override)
            _check_finite(tree)
            # first, since strategies are validated by the codecs that are known by then
            load_codecs(validate(Modules, tree.get("codecs", ()), "codecs"))
            self._values = validate(Params, tree, "", every=True).with_names()
            self._values.check_references()
        except UserError as error:
            raise UserError("\n".join(map(shorten, str(error).split("\n")))) from None

    def __call__(self, *keys: str) -> Any:
        """Return sections, or items of them such as `strategies.ddp`: one value, or a list of them.

        An absent section has its default.

        Raises:
            UserError: a key that is absent and has none.
        """
        values = [self._read(key) for key in keys]
        return values[0] if len(values) == 1 else values

    def _read(self, key: str) -> Any:
        section, _, item = key.partition(".")
        if section in REQUIRED and section not in self._values.model_fields_set:
            raise UserError(self._missing(section))
        if section == "comparison":
            self._values.check_comparison()
        value = getattr(self._values, section)
        if item and item not in value:
            raise UserError(f"{key}: missing from {self._path}; {nearest(item, value)}")
        return value[item] if item else value

    def _missing(self, section: str) -> str:
        example = REQUIRED[section]
        return f"{section}: missing from {self._path}: add it, such as {section}: {example}"

    def complete(self) -> Params:
        """Return all sections.

        Raises:
            UserError: a line for each absent section without a default, or for each strategy that
                cannot take the optimizer; or sections do not fit together.
        """
        if absent := [*REQUIRED.keys() - self._values.model_fields_set]:
            raise UserError("\n".join(map(self._missing, sorted(absent))))
        self("comparison")
        mistakes = []
        for name, strategy in self.all_strategies().items():
            try:
                check_optimizer(strategy, self._values.train.optimizer)
            except UserError as error:
                mistakes.append(f"strategies.{name}: {error}")
        if mistakes:
            raise UserError("\n".join(mistakes))
        return self._values

    def sections(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the sections in canonical form, and what is wrong with those that stages may do
        without, by name: absent ones, and a comparison that is none."""
        absent = REQUIRED.keys() - self._values.model_fields_set
        mistakes = {name: self._missing(name) for name in absent}
        try:
            self._values.check_comparison()
        except UserError as error:
            mistakes.setdefault("comparison", str(error))
        return canonical(self._values), mistakes

    def all_strategies(self) -> dict[str, Strategy]:
        """Return the strategies of the matrix and those for timings alone."""
        return self._values.all_strategies()


def asked_strategies(texts: Iterable[str], path: str | Path) -> dict[str, Strategy]:
    """Return the strategies that arguments of a command ask for, by name.

    Args:
        texts: each a name in the parameters, `all`, or a document in YAML, which has its label for
            a name.
        path: file of the parameters, which is read for names alone.

    Raises:
        UserError: no such name, or no valid strategy.
    """
    asked: dict[str, Strategy] = {}
    for text in texts:
        value = _parse(text, "--strategy")
        if isinstance(value, dict):
            strategy = parse_strategy(value, "--strategy")
            asked[strategy.label()] = strategy
            continue
        if not Path(path).exists():
            raise UserError(
                f"--strategy {text}: no {path} here: name the file by --params, or write a "
                "document, such as '{engine: fsdp2, gradients: {codec: int8}}'"
            )
        named = Parameters(path).all_strategies()
        if text != "all" and text not in named:
            raise UserError(
                f"--strategy {text}: missing from {path}; {nearest(text, named)}; or write a "
                "document, such as '{engine: fsdp2, gradients: {codec: int8}}'"
            )
        asked |= named if text == "all" else {text: named[text]}
    return asked


def read_tree(path: str | Path) -> dict[str, Any]:
    """Read a YAML file, or a JSON file that is named so.

    Raises:
        UserError: it is not UTF-8, neither of both formats, no mapping, or names a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML 1.1 differs from JSON: no tabs, and 1e-3 is text
        tree = json.loads(text) if Path(path).suffix == ".json" else yaml.load(text, _Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run from the folder that holds it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {shorten(str(error))}") from None
    except (UserError, ValueError) as error:  # a date that does not exist
        raise UserError(f"{path}: {shorten(str(error))}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of sections")
    return tree


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses keys that are there twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                line = key.start_mark.line + 1
                raise UserError(f"line {line}: {key.value!r} is there a second time: remove one")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if re.match(r"[-+]?0[0-9_]|.*:", node.value):
            raise UserError(
                f"line {node.start_mark.line + 1}: {node.value} is one number by YAML 1.1 and "
                "another by YAML 1.2, as DVC reads it: write it without leading zeros and colons"
            )
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _check_finite(value: Any, key: str = "") -> None:
    """Refuse numbers that JSON cannot hold."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in items:
            _check_finite(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}: expected a finite number")


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set {override}: expected key=value, for example train.steps=10")
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {key}: {part!r} is a value, not a section")
    node[leaf] = _parse(text, f"--set {key}")


def _parse(text: str, where: str) -> Any:
    """Return the value of a text in JSON or YAML.

    Raises:
        UserError: it is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        try:
            return yaml.load(text, _Loader)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except (yaml.YAMLError, ValueError):
            raise UserError(f"{where}: {text!r} is neither YAML nor JSON") from None
