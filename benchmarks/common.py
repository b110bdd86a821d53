"""Arguments, results and tables of the benchmarks, and their work in child processes."""

import argparse
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlab.comm.emulated_link import Links
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.core.host import describe_host, git_revision
from shardlab.report.tables import make_table
from shardlab.train.launch import launch

DATA = Path("data"), "folder of the pipeline"
WORK = Path(".work/benchmarks"), "folder for results"
RIVAL_PACKAGES = Path(".work/rivals"), "folder of the packages that are compared"

_CODE = "shardlab", "csrc", "benchmarks"
_LONGEST_WAIT_S = 1800.0


def arguments(
    doc: str | None, positional: tuple[str, str] | None = None, **options: Any
) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        doc: docstring of the module, whose first line describes the benchmark.
        positional: name and help of any number of words.
        options: by name the default, or default and help. The default has the type of the value; a
            list takes several values, False makes a switch.
    """
    parser = argparse.ArgumentParser(description=str(doc).partition("\n")[0])
    if positional is not None:
        name, text = positional
        parser.add_argument(name, nargs="*", metavar=name.removesuffix("s").upper(), help=text)
    for name, given in options.items():
        default, words = given if isinstance(given, tuple) else (given, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=words)
            continue
        values = default if isinstance(default, list) else [default]
        kind: Any = type(values[0]) if values else str
        several = "+" if isinstance(default, list) else None
        parser.add_argument(flag, type=kind, nargs=several, default=default, help=words)
    return parser.parse_args()


def choose(names: Sequence[str], known: Collection[str], default: Collection[str]) -> list[str]:
    """Return the given names, or by default the others.

    Raises:
        UserError: a name that is not known.
    """
    unknown = set(names) - set(known)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    return list(names or default)


def code_and_gpus(*more: str) -> dict[str, str]:
    """Return a hash of the code and the GPUs of this machine: results of other ones are outdated.

    The process does not ask CUDA, so that it can fork ranks that do.

    Args:
        more: folders of code besides the library and the benchmarks.
    """
    digest = hashlib.sha256()
    for file in sorted(each for folder in (*_CODE, *more) for each in Path(folder).rglob("*.*")):
        if file.suffix in (".py", ".cpp", ".h", ".yaml"):
            digest.update(file.as_posix().encode() + b"\0" + file.read_bytes())
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        gpus = ""
    return {"code": digest.hexdigest(), "gpus": gpus.strip()}


def write_results(path: Path, **figures: Any) -> None:
    """Write figures as JSON, with the host and the revision of the source."""
    write_json(path, {"host": describe_host(), "revision": git_revision(), **figures})


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and a Markdown table."""
    table = make_table(title, headings, rows, layout="text")
    print(f"{title}\n\n{table.markdown()}")


def on_ranks(
    world_size: int,
    function: Callable[[dist.ProcessGroup], Any],
    threads: int = 1,
    links: Links | None = None,
) -> list[Any]:
    """Return the results of `function`, JSON values, by rank.

    Ranks are children, so that the parent stays free of threads and can fork them.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-benchmark-") as folder:

        def worker(group: dist.ProcessGroup) -> None:
            write_json(Path(folder, str(dist.get_rank(group))), function(group))

        launch(worker, world_size, threads, _LONGEST_WAIT_S, links=links)
        return [read_json(Path(folder, str(rank))) for rank in range(world_size)]
