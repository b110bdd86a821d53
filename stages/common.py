"""What every stage does alike: arguments, a log, one-line errors, and dying with the tool."""

import argparse
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.params import Parameters
from shardlab.core.process import die_with_parent
from shardlab.core.progress import say, stopwatch


def run(main: Callable[..., None]) -> None:
    """Runs `main(params, *arguments)` as the command `python -m stages.NAME ARGUMENTS`.

    The names of the arguments after `params` are those of `main`; all are text. Errors of the user
    are shown as one line (exit 2); every other error with its traceback (exit 1). Both, and how
    long the stage took, are kept in `logs/NAME/ARGUMENTS.log`.
    """
    die_with_parent(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, _stop)
    name = inspect.getmodule(main).__spec__.name.rpartition(".")[2]  # type: ignore[union-attr]
    positional = list(inspect.signature(main).parameters)[1:]
    args = _parse(name, main, positional)
    values = [getattr(args, key) for key in positional]
    elapsed = stopwatch()
    try:
        main(Parameters(args.params, args.set), *values)
    except UserError as error:
        _log(name, values, f"error: {error}")
        say(f"{name}: error: {error}")
        sys.exit(2)
    except BaseException:
        _log(name, values, traceback.format_exc())
        raise
    _log(name, values, f"done in {elapsed():.1f} s")


def _parse(name: str, main: Callable[..., None], positional: list[str]) -> argparse.Namespace:
    module = inspect.getmodule(main)
    parser = argparse.ArgumentParser(f"python -m stages.{name}", description=module.__doc__)
    for key in positional:
        parser.add_argument(key)
    parser.add_argument("--params", default="params.yaml", help="YAML or JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter"
    )
    return parser.parse_args()


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _log(name: str, values: list[str], message: str) -> None:
    path = (
        Path("logs", name, *values).with_suffix(".log") if values else Path("logs", f"{name}.log")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as log:
        log.write(f"{datetime.now().isoformat(timespec='seconds')} {message.rstrip()}\n")


def integer(name: str, text: str) -> int:
    """An argument of a stage as a whole number.

    Raises:
        UserError: it is none.
    """
    if not text.isdecimal():
        raise UserError(f"{name}: expected a whole number (found {text!r})")
    return int(text)
