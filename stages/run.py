"""Make all results of params.yaml with Snakemake, and show the headline.

Other options and targets are handed to Snakemake: --dry-run shows what would run.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.process import on_end_signals
from shardlab.core.progress import say
from shardlab.report.markdown import unescape
from stages.common import stop

_REPORT = Path("results/report")


def main(arguments: Sequence[str]) -> None:
    """Run Snakemake here on all cores, with these arguments."""
    if not Path("params.yaml").exists():
        raise UserError("params.yaml: no such file: shardlab init DIR writes one into a folder")
    if not Path("stages").exists():
        raise UserError("stages: no such folder: shardlab init . writes the links of a clone")
    snakemake(Path(), *arguments)
    if not arguments and (_REPORT / "headline.md").exists():
        headline = (_REPORT / "headline.md").read_text(encoding="utf-8")
        print(f"\n{unescape(headline)}")
        print(f"The whole comparison: {(_REPORT / 'report.html').absolute()}")


def _interrupted(number: int) -> None:
    say("interrupted: the same command goes on from there")
    stop(number)


def snakemake(folder: Path, *arguments: str) -> None:
    """Run Snakemake in the folder of an experiment; its jobs end with this process, by a signal
    with a line that says how to go on.

    Raises:
        ModuleNotFoundError: it is not installed.
        UserError: it failed, and has said why.
    """
    if find_spec("snakemake") is None:
        raise ModuleNotFoundError("Snakemake is not installed", name="snakemake")
    on_end_signals(_interrupted)
    command = [sys.executable, "-m", "snakemake", "--cores", "all", *arguments]
    # the stages call `python`
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "PATH": path}) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # it ends its jobs
            raise
    if code:
        raise UserError(
            f"{folder.absolute()}: failed as shown above: the same command goes on from there"
        )
