"""Common parts of all stages: arguments, log, one-line errors, and orderly ends by signals."""

import argparse
import gc
import inspect
import os
import signal
import sys
import time
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import stages
from shardlab.config.parameters import Parameters
from shardlab.core import progress
from shardlab.core.errors import RunFailed, UserError
from shardlab.core.files import read_json
from shardlab.core.lock import lock_tree
from shardlab.core.process import on_end_signals
from shardlab.core.progress import log_to, say

SAMPLES = ("batch_size", "accumulation", "sequence_length")
"""parameters of `train` that give the size of a step"""


def run(main: Callable[..., None], log: Sequence[str] | None = None, lock: bool = True) -> None:
    """Run `main(params, ...)` as the command `python -m stages.NAME ARGUMENTS`, or `shardlab NAME`.

    The arguments after `params` are those of `main`, by their names: positional ones are text,
    keyword-only ones are options `--like-this`, whose annotation is `Annotated[type, help]`. Errors
    of the user are shown as one line (exit 2); a run that failed with the traceback of the rank
    that is the cause, every other error with its own (exit 1). All of them, what the stage says and
    how long it took are kept in a log. Nobody else works in this folder meanwhile.

    Args:
        log: the arguments whose values name the log `logs/NAME/VALUE/VALUE.log`; when not given,
            the positional ones.
        lock: whether to lock this folder; a command that runs Snakemake leaves that to it.
    """
    # imported objects stay alive: neither this process nor forked ranks should scan them again
    gc.freeze()
    gc.enable()
    on_end_signals(stop)
    name = inspect.getmodule(main).__spec__.name.rpartition(".")[2]  # type: ignore[union-attr]
    parser, positional = _parser(name, main)
    given = vars(parser.parse_args())
    params, overrides = given.pop("params"), given.pop("set")
    values = [given.pop(key) for key in positional]
    named = values if log is None else [str(given[key]) for key in log]
    path = _log_path(name, named)
    log_to(path)
    try:
        if lock:
            _refuse_other_results(params)
            lock_tree()
        main(Parameters(params, overrides), *values, **given)
    except (UserError, RunFailed) as error:
        # mistakes in the parameters are a line each
        for line in str(error).split("\n") if isinstance(error, UserError) else [str(error)]:
            say(f"{name}: error: {line}")
        _show_log(path)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BaseException:
        if not progress.logs_stderr():
            progress.log(traceback.format_exc())
        _show_log(path)
        raise
    # imports take most of a short stage
    progress.log(f"done in {time.time() - psutil.Process().create_time():.1f} s")


def run_command(name: str, main: Callable[[], None]) -> None:
    """Run `main()` as a command that is no stage: it keeps no log and takes no lock.

    Mistakes of the user are shown as one line (exit 2).
    """
    # both are off during imports, see stages/__init__.py
    gc.enable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # who reads the output may stop, such as head
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except (UserError, RunFailed) as error:
        say(f"{name}: error: {error}")
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


class Parser(argparse.ArgumentParser):
    """Arguments of `python -m stages.NAME` or `shardlab NAME`, whose mistakes are shown as one line
    (exit 2).

    Args:
        stage: name of its module.
        description: first paragraph of the help.
    """

    def __init__(self, stage: str, description: str | None) -> None:
        super().__init__(
            prog=stages.program or f"python -m stages.{stage}",
            description=description,
            epilog=stages.program and f"example: {stages.program} {stages.example}".rstrip(),
        )
        self._stage = stage

    def error(self, message: str) -> typing.NoReturn:
        """Print one line, without the usage."""
        say(f"{self._stage}: error: {message}; see {self.prog} --help")
        sys.exit(2)


def _parser(name: str, main: Callable[..., None]) -> tuple[Parser, list[str]]:
    """Return the argument parser of a stage and the names of its positional arguments."""
    parser = Parser(name, description=inspect.getmodule(main).__doc__)
    positional = []
    for key, parameter in list(inspect.signature(main).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            _add_option(parser, key, parameter)
        else:
            parser.add_argument(key)
            positional.append(key)
    parser.add_argument("--params", default="params.yaml", help="YAML or JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter"
    )
    return parser, positional


def _add_option(parser: Parser, key: str, parameter: inspect.Parameter) -> None:
    annotation, words = typing.get_args(parameter.annotation)
    if annotation is bool:
        parser.add_argument(f"--{key.replace('_', '-')}", action="store_true", help=words)
        return
    required = parameter.default is parameter.empty
    default = None if required else parameter.default
    parser.add_argument(
        f"--{key.replace('_', '-')}",
        type=_whole if annotation is int else str,
        required=required,
        default=default,
        help=words if default is None else f"{words} (default {default})",
    )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number (found {text!r})") from None


def _refuse_other_results(params: str) -> None:
    """Refuse to write results of other parameters over those of params.yaml, which git may hold.

    Raises:
        UserError: the folder has a params.yaml that is another file.
    """
    own, given = Path("params.yaml"), Path(params)
    if own.exists() and given.exists() and not given.samefile(own):
        raise UserError(
            f"--params {params}: data and results here are those of params.yaml: make "
            f"experiments/{given.stem} PARAMS={params} makes a folder for others"
        )


def stop(number: int) -> None:
    """End this process with the exit code of one that this signal ended."""
    raise SystemExit(128 + number)


def _log_path(name: str, values: list[str]) -> Path:
    # an invalid name given by the user may be a path
    return Path("logs", name, *(value.replace("/", "_") for value in values)).with_suffix(".log")


def _show_log(path: Path) -> None:
    """Show where the log of a failed stage of DVC is, as Snakemake does for its jobs itself."""
    if "DVC_STAGE" in os.environ and path.is_file():
        print(f"log: {path}", file=sys.stderr)


def require(path: str | Path, stage: str) -> None:
    """Check that a stage has written a file.

    Raises:
        UserError: it is missing.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file: run python -m stages.{stage}")


def source_parameters(params: Parameters) -> dict[str, Any]:
    """Return the parameters that the corpus depends on, by dotted keys."""
    section = params("data").model_dump(mode="json", exclude={"validation_share"})
    return {f"data.{name}": value for name, value in section.items()}


def token_parameters(params: Parameters) -> dict[str, Any]:
    """Return the parameters that the tokens depend on, by dotted keys."""
    data, options, model = params("data", "tokenize", "model")
    section = options.for_model(model).model_dump(mode="json")
    return {
        **source_parameters(params),
        "data.validation_share": data.validation_share,
        **{f"tokenize.{name}": value for name, value in section.items()},
    }


def refuse_other_source(params: Parameters) -> None:
    """Check that the corpus was made by these parameters.

    Both tools take care of it; a stage that somebody typed with `--set` may have made another.

    Raises:
        UserError: by others, or there is none.
    """
    _refuse_others(Path("data/source.json"), source_parameters(params), "prepare")


def refuse_other_tokens(params: Parameters) -> None:
    """Check that the tokens were made by these parameters.

    Raises:
        UserError: by others, or there are none.
    """
    _refuse_others(Path("data/tokens/manifest.json"), token_parameters(params), "tokenize")


def _refuse_others(path: Path, wanted: dict[str, Any], stage: str) -> None:
    made = read_json(path, f"run python -m stages.{stage}").get("parameters", {})
    for key in made:  # none: of a folder that no stage has made
        if made[key] != wanted.get(key):
            raise UserError(
                f"{path}: made with {key} {made[key]!r}, and the parameters say "
                f"{wanted.get(key)!r}: run python -m stages.{stage}, with the same --set if any"
            )


def integer(name: str, text: str) -> int:
    """Parse an argument of a stage as a whole number.

    Raises:
        UserError: it is none.
    """
    if not text.isdecimal():
        raise UserError(f"{name}: expected a whole number (found {text!r})")
    return int(text)
