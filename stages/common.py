"""Common parts of all stages: log, one-line errors, orderly ends by signals, and what they need of
each other."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shardlab import cli
from shardlab.core import progress
from shardlab.core.errors import RunFailed, UserError
from shardlab.core.files import read_json
from shardlab.core.lock import lock_tree
from shardlab.core.process import on_end_signals
from shardlab.core.progress import log_to, say
from stages.sections import Sections

SAMPLES = ("batch_size", "global_batch_size", "accumulation", "sequence_length")
"""parameters of `train` that give the size of a step"""


def run(name: str, main: Callable[..., None], options: dict[str, Any]) -> None:
    """Run `main(params, ...)` of a stage with options as `shardlab.cli` has parsed them.

    Errors of the user are shown as one line (exit 2); a run that failed with the traceback of the
    rank that is the cause, every other error with its own (exit 1). All of them, what the stage
    says and how long it took are kept in the log `logs/NAME/VALUE.log`. Nobody else works in this
    folder meanwhile.
    """
    # imported objects stay alive: neither this process nor forked ranks should scan them again
    gc.freeze()
    on_end_signals(stop)
    params, overrides = options.pop("params"), options.pop("overrides")
    path = _log_path(name, [str(options[key]) for key in cli.STAGES[name].log])
    log_to(path)
    try:
        _refuse_other_results(params)
        lock_tree()
        main(Sections(params, overrides), **options)
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
        raise UserError(f"{path}: no such file: run shardlab {stage}")


def source_parameters(params: Sections) -> dict[str, Any]:
    """Return the parameters that the corpus depends on, by dotted keys."""
    section = params.plain("data").items()
    return {f"data.{name}": value for name, value in section if name != "validation_share"}


def token_parameters(params: Sections) -> dict[str, Any]:
    """Return the parameters that the tokens depend on, by dotted keys."""
    section = params.plain("tokenize")
    return {
        **source_parameters(params),
        "data.validation_share": params.plain("data.validation_share"),
        **{f"tokenize.{name}": value for name, value in section.items()},
    }


def refuse_other_source(params: Sections) -> None:
    """Check that the corpus was made by these parameters.

    Both tools take care of it; a stage that somebody typed with `--set` may have made another.

    Raises:
        UserError: by others, or there is none.
    """
    _refuse_others(Path("data/source.json"), source_parameters(params), "prepare")


def refuse_other_tokens(params: Sections) -> None:
    """Check that the tokens were made by these parameters.

    Raises:
        UserError: by others, or there are none.
    """
    _refuse_others(Path("data/tokens/manifest.json"), token_parameters(params), "tokenize")


def _refuse_others(path: Path, wanted: dict[str, Any], stage: str) -> None:
    made = read_json(path, f"run shardlab {stage}").get("parameters", {})
    for key in made:  # none: of a folder that no stage has made
        if made[key] != wanted.get(key):
            raise UserError(
                f"{path}: made with {key} {made[key]!r}, and the parameters say "
                f"{wanted.get(key)!r}: run shardlab {stage}, with the same --set if any"
            )
