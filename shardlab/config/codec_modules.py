"""Modules of users that register codecs: the list `codecs` of params.yaml."""

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardlab.config.codec_table import registered
from shardlab.core.errors import UserError, nearest

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
        _load(entry, f"{where}.{i}")


def _load(entry: str, where: str) -> None:
    name = entry.removesuffix(".py").replace("/", ".")
    before = registered()
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
    new = registered().keys() - before.keys()
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
