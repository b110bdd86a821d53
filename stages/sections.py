"""Parameters as a stage reads them: sections in canonical form, each by a type of the package that
reads it.

The form is that of data/params.yaml, which both tools compare, so that another value is another
key. A stage imports the settings that it reads, and no others.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

from shardlab.config.parameters import Parameters
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest

T = TypeVar("T")


class Sections:
    """The parameters in a file, possibly a part of them, with overrides from the command line.

    Args:
        path: YAML, or JSON in a file named so.
        overrides: `key=value` texts, as of `shardlab.config.parameters.Parameters`.

    Raises:
        UserError: a line for each mistake.
    """

    def __init__(self, path: str | Path = "params.yaml", overrides: Iterable[str] = ()) -> None:
        self.path, self.overrides = path, [*overrides]
        self._tree, self._mistakes = Parameters(path, self.overrides).sections()

    @property
    def arguments(self) -> list[str]:
        """Arguments of a stage that is to have these parameters."""
        return [f"--params={self.path}", *(f"--set={text}" for text in self.overrides)]

    @overload
    def __call__(self, key: str, kind: type[T], *names: str) -> T: ...
    @overload
    def __call__(self, key: str, kind: Any, *names: str) -> Any: ...
    def __call__(self, key: str, kind: Any, *names: str) -> Any:
        """Return a section, or an item of it such as `strategies.ddp`.

        A stage reads just the keys that dvc.yaml and the rules declare for it.

        Args:
            kind: type of the value.
            names: fields of the section that are read; others are at their defaults. None: all.

        Raises:
            UserError: a key that is absent.
        """
        value = self.plain(key)
        if names:
            value = {name: value[name] for name in names}
        return validate(kind, value, key)

    def plain(self, key: str) -> Any:
        """Return a section or an item of it as plain data.

        Raises:
            UserError: it is absent.
        """
        value, parts = self._tree, key.split(".")
        if parts[0] in self._mistakes:
            raise UserError(self._mistakes[parts[0]])
        for part in parts:
            if part not in value:
                raise UserError(f"{key}: missing from {self.path}; {nearest(part, value)}")
            value = value[part]
        return value
