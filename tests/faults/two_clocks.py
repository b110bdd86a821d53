"""Two timings started at once, in two folders: both records say that others used their CPUs.

    python -m tests.faults.two_clocks [N]

starts N (20) pairs of timings and as many single ones. On a machine that is otherwise idle, the
single ones are those that must not be marked.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import shardlab.timing.interleaved  # noqa: F401 - imported once, before the commands are forked
from shardlab.records.contention import Contention, disturbed
from shardlab.records.timing import read_timings
from tests.commands import Command, typed
from tests.token_data import make_token_data

_REPETITIONS = 150
"""some seconds: longer than one command starts after the other"""
_LIMIT_S = 300.0


def _params(repetitions: int) -> dict[str, Any]:
    return {
        "model": {"preset": "tiny"},
        "strategies": {"ddp": {"engine": "ddp"}},
        "train": {"batch_size": 4, "sequence_length": 64, "profiled_steps": 1},
        "timings": {"clock": {"runs": ["ddp"], "repetitions": repetitions}},
    }


def make_projects(root: Path, count: int, repetitions: int = _REPETITIONS) -> list[Path]:
    """Make folders in which a timing can be started, with data of their own."""
    projects = [root / f"project{number}" for number in range(count)]
    for project in projects:
        make_token_data(project / "data")
        (project / "params.yaml").write_text(yaml.safe_dump(_params(repetitions)))
    return projects


def time_at_once(projects: list[Path]) -> list[Contention | None]:
    """Start the timings of all folders at once; return what each of them says of the others."""
    commands = [_start(project) for project in projects]
    for command in commands:
        assert command.wait(_LIMIT_S) == 0, command.said()
    return [
        read_timings(project / "results/timings/clock.jsonl", "time it again")[0].contention
        for project in projects
    ]


def _start(project: Path) -> Command:
    folder = Path(tempfile.mkdtemp(prefix="command", dir=project))
    return typed(folder, project, "stages.timing", "clock")


def _main(count: int = 20) -> None:
    with tempfile.TemporaryDirectory(prefix="shardlab-clocks-") as folder:
        projects = make_projects(Path(folder), 2)
        pairs = [each for _ in range(count) for each in time_at_once(projects)]
        alone = [each for _ in range(count) for each in time_at_once(projects[:1])]
    for name, found in (("two at once", pairs), ("alone", alone)):
        shares = sorted(each.foreign + each.stolen for each in found if each is not None)
        marked = sum(map(disturbed, found))
        spread = ", ".join(f"{shares[round(q * (len(shares) - 1))]:.1%}" for q in (0, 0.5, 1))
        print(f"{name}: {marked} of {len(found)} marked; least, median, most: {spread}")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
