"""Kill stages at random moments: a rerun makes the same outputs, and nothing is left of the killed.

    python -m tests.faults.crashes [KILLS [SEED]]

Runs the small experiment in a temporary folder, and then ends each of its stages KILLS (50) times
by SIGKILL. Half of the times the outputs were there before. Outputs are compared byte by byte;
values that differ between undisturbed runs of the stage, such as times, are left out.
"""

import importlib
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

from tests.commands import Command, typed
from tests.pipeline.workspace import copy_project, run, set_params

STAGES: dict[str, tuple[str, ...]] = {
    "prepare": (),
    "tokenize": (),
    "train": ("--run", "fsdp2-int8"),
    "validate": ("fsdp2-int8", "0"),
    "trial": ("1",),
    "report": (),
}
_UNDISTURBED = 3
_LEFT_S = 15.0
"""ranks end with their parent within seconds, also on a busy machine"""
_COUNTED_AGAIN = re.compile(r"bytes_wire|compression_ratio|bandwidth_wire")
"""of a run that resumes: its ranks compare 8 bytes for each kind of message once more"""
_OF_A_RACE = re.compile(r"\.(race|trained|seconds)\b")
"""keys of what a trial measures, and of what it trains therefore"""
_FOLDERS = "data", "results", ".trials"
_Files = dict[str, bytes]


@dataclass
class Crashes:
    """Result of killing one stage."""

    stage: str
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        recovery = f"{statistics.median(self.recovery_s):.1f} s" if self.recovery_s else "-"
        return f"{self.stage:10} {self.kills:5} {len(self.faults):6} {recovery:>9}"


class Stage:
    """A stage of a project with all its inputs, and the outputs of undisturbed runs."""

    def __init__(self, project: Path, name: str, scratch: Path) -> None:
        self._project, self._name, self._scratch = project, name, scratch
        self._started = 0
        # forked from here, so that a start takes no imports
        importlib.import_module(f"stages.{name}")
        before = self._times()
        runs, self.duration_s = [], 0.0
        for _ in range(_UNDISTURBED):
            self._clear()
            self.duration_s = self.finish()
            runs.append(self.files())
        self.outputs = [path for path, when in self._times().items() if before.get(path) != when]
        self._expected = runs[0]
        self._varying = {
            path: set().union(*(_differences(path, runs[0][path], each[path]) for each in runs))
            for path in self.outputs
        }

    def start(self) -> Command:
        """Start the stage."""
        self._started += 1
        folder = self._scratch / f"{self._name}{self._started}"
        return typed(folder, self._project, f"stages.{self._name}", *STAGES[self._name])

    def finish(self) -> float:
        """Run the stage to its end; return how long it took, in seconds."""
        begin = time.monotonic()
        command = self.start()
        code = command.wait(300)
        assert code == 0, command.said()
        return time.monotonic() - begin

    def remove_outputs(self) -> None:
        """Remove what the stage writes."""
        for path in self.outputs:
            (self._project / path).unlink(missing_ok=True)
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._project / ".trials", ignore_errors=True)

    def files(self) -> _Files:
        """Return all files of data and results, hidden ones included."""
        return {path: (self._project / path).read_bytes() for path in self._times()}

    def _times(self) -> dict[str, int]:
        paths = [p for name in _FOLDERS for p in (self._project / name).rglob("*") if p.is_file()]
        return {str(p.relative_to(self._project)): p.stat().st_mtime_ns for p in paths}

    def damaged(self) -> Iterator[str]:
        """Yield outputs under their final names that differ from those of undisturbed runs."""
        for path, content in self.files().items():
            if path in self._expected and not path.startswith(".trials"):
                varying = self._varying.get(path, set())
                if different := _differences(path, self._expected[path], content) - varying:
                    yield f"{path} differs at {sorted(different)[:3]}"

    def missing(self) -> Iterator[str]:
        """Yield files that undisturbed runs leave and this one did not, and the reverse."""
        found = self.files().keys()
        for path in sorted(self._expected.keys() ^ found):
            if path.startswith(".trials/") and path.endswith(".json"):
                continue  # what a race finds to be faster is trained, and races differ
            yield f"{path} is {'left over' if path in found else 'missing'}"


def _differences(path: str, one: bytes, other: bytes) -> set[str]:
    """Return the keys of JSON that differ, or `all` of another file."""
    if one == other:
        return set()
    if not path.endswith((".json", ".jsonl")):
        return {"all"}
    try:
        return set(_different_keys(_read(path, one), _read(path, other), ""))
    except ValueError:
        return {"no JSON"}


def _read(path: str, content: bytes) -> Any:
    lines = content.splitlines() if path.endswith(".jsonl") else [content]
    return [json.loads(line) for line in lines]


def _different_keys(one: Any, other: Any, key: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _different_keys(one[name], other[name], f"{key}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for first, second in zip(one, other, strict=True):
            yield from _different_keys(first, second, f"{key}.*")
    elif one != other and not _may_differ(key, one, other):
        yield key


def _may_differ(key: str, one: Any, other: Any) -> bool:
    if _OF_A_RACE.search(key):
        return True
    # few steps make the share of one more message large; contention is a time, and memory what the
    # process had at hand, though undisturbed runs may happen to agree
    if re.search(r"collectives?(_ms|_s)?$|metadata_bytes$|contention|memory_\w+_bytes$", key):
        return True
    return bool(_COUNTED_AGAIN.search(key)) and isclose(one, other, rel_tol=1e-4)


def kill(stage: Stage, name: str, kills: int, generator: random.Random) -> Crashes:
    """Kill a stage again and again, each time followed by a run to its end."""
    found = Crashes(name)
    for _ in range(kills):
        if generator.random() < 0.5:
            stage.remove_outputs()
        moment = generator.uniform(0, stage.duration_s)
        faults = [*_kill_once(stage, moment), *stage.damaged()]
        found.recovery_s.append(stage.finish())
        faults += [*stage.damaged(), *stage.missing()]
        found.kills += 1
        found.faults += [f"killed after {moment:.2f} s: {fault}" for fault in faults]
    return found


def _kill_once(stage: Stage, moment: float) -> Iterator[str]:
    command = stage.start()
    time.sleep(moment)
    command.kill()
    deadline = time.monotonic() + _LEFT_S
    while left := command.family():
        if time.monotonic() > deadline:
            yield f"processes {left} are left"
            return
        time.sleep(0.02)


def prepare_project(folder: Path) -> Path:
    """Run the small experiment, with checkpoints."""
    project = copy_project(folder)
    set_params(project, train__checkpoint={"every": 2}, train__steps=40)
    run(project, "snakemake", "--cores", "2", "--quiet", "rules")
    return project


def main(kills: int = 50, seed: int = 0) -> None:
    """Print the table; fail if anything was damaged or left."""
    generator = random.Random(seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        project = prepare_project(Path(folder, "project"))
        print(f"{'stage':10} {'kills':>5} {'faults':>6} {'recovery':>9}", flush=True)
        for name in STAGES:
            stage = Stage(project, name, Path(folder, "scratch"))
            results.append(kill(stage, name, kills, generator))
            print(results[-1], *results[-1].faults, sep="\n  ", flush=True)
    sys.exit(any(result.faults for result in results))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
