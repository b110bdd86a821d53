"""Arguments of a command, whose mistakes are one line."""

import argparse
from typing import NoReturn

from shardlab.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that leaves it to the command to show mistakes."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        raise UserError(f"{message}; see {self.prog} --help")
