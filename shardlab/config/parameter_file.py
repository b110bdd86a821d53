"""Parameter files: YAML or JSON to a tree of plain values, read strictly."""

import json
from pathlib import Path
from typing import Any

import yaml

from shardlab.core.errors import UserError

_LARGEST = 2**53
"""integers above it are not exact in JSON readers"""
_LONGEST = 1000
"""characters of a text, for names, paths and addresses"""
_BYTES = 1_000_000
"""of a file"""
_DEEPEST, _MOST = 30, 100_000
"""levels and values of a file"""
_MESSAGE = 300
"""characters of an error message"""


def read_tree(path: str | Path) -> dict[str, Any]:
    """Read a YAML file, or a JSON file that is named so.

    Raises:
        UserError: it is not UTF-8, neither of both formats, nested deeply, no mapping, names a key
            twice, or holds a number or a text that no parameter can have.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_BYTES + 1)
        if len(content) > _BYTES:
            raise UserError("larger than 1 MB: this is no parameter file")
        text = content.decode()
        # YAML 1.1 differs from JSON: no tabs, and 1e-3 is text
        tree = _read_json(text) if Path(path).suffix == ".json" else _read_yaml(text)
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
    except RecursionError:
        raise UserError(f"{path}: nested too deeply: parameters have a few levels") from None
    except UserError as error:
        raise UserError(f"{path}: {shorten(str(error))}") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise UserError(f"{path}: {shorten(str(error))}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of sections")
    try:
        check_values(tree)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return tree


def check_values(tree: Any, key: str = "") -> None:
    """Refuse values that no parameter can have, wherever they are below `key`.

    Raises:
        UserError: a number is not finite or beyond 2**53, a text beyond 1000 characters, a value of
            another type than JSON has, or there are too many levels or values (by aliases, too).
    """
    waiting = [((key,) if key else (), tree)]
    count = 0
    while waiting:
        path, value = waiting.pop()
        count += 1
        if count > _MOST or len(path) > _DEEPEST:
            raise UserError("nested too deeply, or too many values: parameters have a few levels")
        if isinstance(value, dict):
            waiting += [((*path, str(name)), each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, str(index)), each) for index, each in enumerate(value)]
        elif fault := _fault(value):
            raise UserError(shorten(f"{'.'.join(path)}: {fault}"))


def _fault(value: Any) -> str | None:
    if isinstance(value, str):
        return f"a text of {len(value)} characters" if len(value) > _LONGEST else None
    if isinstance(value, int | float):
        # the comparison is false for NaN
        return None if abs(value) <= _LARGEST else "expected a finite number of at most 2**53"
    kind = type(value).__name__
    return None if value is None else f"expected a text or a number (found a {kind}): quote it"


def shorten(text: str) -> str:
    """Return a message as one line of at most 300 printable characters, without its middle."""
    line = " ".join(text.split())
    line = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in line)
    if len(line) <= _MESSAGE:
        return line
    # the beginning says where the mistake is, the end how to fix it
    return f"{line[: _MESSAGE // 2 - 3]} ... {line[2 - _MESSAGE // 2 :]}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses keys that are there twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {line}: a key that is no text")
            if key.value in seen:
                raise UserError(f"line {line}: {key.value!r} is there a second time: remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{shorten(repr(twice))} is there twice in one mapping: remove one")
    return tree
