"""Command lines, timings, ranks and pages of figures of the benchmarks."""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links
from shardlab.core.files import write_text
from shardlab.core.host import describe_host, git_revision, torch_version
from shardlab.core.link import Link
from shardlab.report.tables import Table, make_table
from shardlab.train.launch import launch

DATA = Path("data"), "folder of the pipeline"
WORK = Path(".work/benchmarks"), "folder for intermediate files"
RIVAL_PACKAGES = Path(".work/rivals"), "folder of the packages that are compared"

_FIGURES = Path("docs/figures"), "folder of the page that is written"
_LONGEST_WAIT_S = 1800.0
_SPINNING_S = 0.05


def arguments(
    doc: str | None, positional: tuple[str, str] | None = None, **options: Any
) -> argparse.Namespace:
    """Parse the command line of a benchmark; every one has `--out FOLDER`, for its pages.

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
    for name, option in {"out": _FIGURES, **options}.items():
        default, text = option if isinstance(option, tuple) else (option, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        values = default if isinstance(default, list) else [default]
        kind: Any = type(values[0]) if values else str
        several = "+" if isinstance(default, list) else None
        parser.add_argument(flag, type=kind, nargs=several, default=default, help=text)
    return parser.parse_args()


def text_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts."""
    return make_table(title, headings, rows, layout="text")


def publish(doc: str | None, page: Path, *parts: Table | str, measured: Sequence[str] = ()) -> None:
    """Print tables and sentences, and write them as Markdown, with what they were measured by.

    Args:
        doc: docstring of the benchmark, whose first line is the title.
        page: file with the name of the benchmark; a page of an earlier run is replaced.
        measured: by what, where it was not by this process.
    """
    body = "\n".join(
        f"## {part.title}\n\n{part.markdown()}" if isinstance(part, Table) else f"{part}\n"
        for part in parts
    )
    print(body)
    title = str(doc).partition("\n")[0].rstrip(".")
    command = shlex.join(["python", "-m", f"benchmarks.{page.stem}", *sys.argv[1:]])
    host = describe_host()
    machine = [f"{host['cores']} cores of {host['cpu']}", f"{host['memory_bytes'] / 1e9:.0f} GB"]
    here = (
        f"Host: {', '.join([*machine, *host['gpus']])}",
        f"Software: Python {host['python']}, torch {torch_version()}, Linux {host['kernel']}",
    )
    facts = [
        f"- Command: `{command}`; its docstring says what is measured",
        f"- Revision: {git_revision()}, {time.strftime('%Y-%m-%d')}",
        *(f"- {fact}" for fact in measured or here),
    ]
    write_text(page, "\n".join([f"# {title}\n", *facts, "", body]))


def on_ranks(
    world_size: int,
    function: Callable[[dist.ProcessGroup], Any],
    threads: int = 1,
    rate: str | None = None,
) -> list[Any]:
    """Return the results of `function`, JSON values, by rank.

    Ranks are children, so that the parent stays free of threads and can fork them.

    Args:
        rate: of an emulated link between the ranks, such as 100mbit.

    Raises:
        UserError: the system does not let this process emulate a link.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardlab-benchmark-"))
        links = rate and stack.enter_context(Links(world_size, Link(rate=rate)))

        def worker(group: dist.ProcessGroup) -> None:
            Path(folder, str(dist.get_rank(group))).write_text(json.dumps(function(group)))

        launch(worker, world_size, threads, _LONGEST_WAIT_S, links=links or None)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world_size)]


def interleaved_times(
    calls: Mapping[str, Callable[[], object]],
    repetitions: int,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds of the repetitions of each call; calls take turns, the first turn is untimed.

    With several threads each is a pause and two calls, of which the second is timed: torch's
    threads spin for some 10 ms after an operation, on processors that the next call needs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions + 1):
        for name, call in calls.items():
            if threads > 1:
                time.sleep(_SPINNING_S)
                call()
            start = clock()
            call()
            seconds[name].append(clock() - start)
    torch.set_num_threads(before)
    return {name: values[1:] for name, values in seconds.items()}


def best_times(
    calls: Mapping[str, Callable[[], object]], repetitions: int, *args: Any, **options: Any
) -> dict[str, float]:
    """Return seconds of the fastest repetition of each call, as `interleaved_times`."""
    seconds = interleaved_times(calls, repetitions, *args, **options)
    return {name: min(values) for name, values in seconds.items()}


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device; a call then costs a launch and a wait more."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
