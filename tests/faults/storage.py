"""Fail calls that write, one at a time: a stage says so in one line and damages nothing.

    python -m tests.faults.storage [CALLS [STAGE...]]

runs the stages of a small experiment in a temporary folder. Each is repeated CALLS (20) times for
each error, with a different call failing (open for writing, write, fsync, truncate, rename, mkdir,
link; of any of its processes), and once more without a fault. The disk stays full or read-only from
that call on; the other errors come once.
"""

import errno
import gzip
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file

from tests.commands import typed
from tests.faults.storage_shim import VARIABLE, Control, preloaded, shared_control
from tests.pipeline.workspace import copy_project, set_params

_EVERY, _STEPS, _RUN = 2, 6, "fsdp2"
STAGES = [
    ("code",),
    ("plans",),
    ("prepare",),
    ("tokenize",),
    ("estimate",),
    ("train", "--run", _RUN),
    ("profile", _RUN, "0"),
    ("validate", _RUN, "0"),
    ("timing", "one-rank"),
    ("timing", "two-ranks"),
    ("calibrate",),
    ("forecast",),
    ("collect",),
    ("propose", "1"),
    ("trial", "1"),
    ("decide", "1"),
    ("policies",),
    ("report",),
    ("readme",),
]
"""in the order of the pipeline"""
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)


@dataclass
class Row:
    """Result of one stage with one error."""

    stage: str
    error: str
    calls: int
    """that a run of the stage makes"""
    tried: int = 0
    one_line: int = 0
    unharmed: int = 0
    """runs that succeeded all the same: what failed was a log"""
    traceback: int = 0
    damaged: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        numbers = (self.calls, self.tried, self.one_line, self.unharmed, self.traceback)
        cells = "".join(f"{number:10}" for number in (*numbers, self.damaged))
        return f"{self.stage:10} {self.error:7}{cells}"


HEADING = f"{'stage':10} {'error':7}" + "".join(
    f"{name:>10}" for name in ("calls", "tried", "one line", "unharmed", "traceback", "damaged")
)


class Stage:
    """A stage of a project that has all its inputs."""

    def __init__(self, control: Control, project: Path, scratch: Path, words: tuple[str, ...]):
        self._control, self._project, self._scratch = control, project, scratch
        self.name, *self._arguments = words
        self._started = 0
        importlib.import_module(f"stages.{self.name}")  # processes are forked from here
        self._before = scratch / "before"
        _copy(project, self._before)
        code, said = self._run()
        assert code == 0, f"{self.name}: {said}"
        self.calls = control.calls
        self._clean = {path: (project / path).read_bytes() for path in self._files()}

    def _run(self, first: int = 0, number: int = 0) -> tuple[int, str]:
        self._started += 1
        folder = self._scratch / f"{'-'.join([self.name, *self._arguments])}{self._started}"
        self._control.arm(self._project, first, number)
        command = typed(folder, self._project, f"stages.{self.name}", *self._arguments)
        code = command.wait(300)
        self._control.root = b""
        return code, command.said()

    def fail(self, call: int, number: int, row: Row) -> None:
        """Run with a fault and once more without; count what came of it."""
        _copy(self._before, self._project)
        code, said = self._run(call, number)
        failed = os.fsdecode(self._control.failed)
        row.tried += 1
        lines = said.splitlines()
        if "Traceback" in said or (code and not _is_error(lines[-1] if lines else "")):
            row.traceback += 1
            row.faults.append(f"call {call} ({failed}): {said[-1500:]}")
        else:
            row.one_line += code != 0
            row.unharmed += code == 0
        damage = [*self._harmed(), *(self._lost(failed) if code else ())]
        # the files of a run that says it succeeded are all there; those of a rerun in any case
        if code == 0 and failed:
            damage += self._incomplete()
        kept = self._checkpoint()
        code, said = self._run()
        if code != 0:
            damage.append(f"a rerun fails: {said[-800:]}")
        elif kept and f"continues after step {kept}" not in said:
            damage.append(f"a rerun ignores the checkpoint of step {kept}")
        damage += [*self._harmed(), *self._incomplete()]
        row.damaged += bool(damage)
        row.faults += [f"call {call} ({failed}): {each}" for each in damage]

    def _files(self) -> list[str]:
        found = [p for top in ("data", "results") for p in (self._project / top).rglob("*")]
        return [str(path.relative_to(self._project)) for path in found if path.is_file()]

    def _harmed(self) -> Iterator[str]:
        """Yield files under a final name that are not whole."""
        for path in self._files():
            if any(part.startswith(".") for part in Path(path).parts):
                continue
            content = (self._project / path).read_bytes()
            before = self._before / path
            if before.is_file() and content == before.read_bytes():
                continue
            fixed = path.startswith("data/") or "final_model" in path
            if content != self._clean.get(path) and (fixed or not _is_whole(self._project / path)):
                yield f"{path} is half-written"
            trial = path.startswith("results/") and path.endswith("trial.json")
            if trial and '"ok"' not in content.decode():
                yield f"{path} blames the strategies"

    def _incomplete(self) -> list[str]:
        return [f"{path}: missing or left over" for path in {*self._files()} ^ self._clean.keys()]

    def _checkpoint(self) -> int:
        """Return the step of the last checkpoint, or 0."""
        names = [path.name for path in (self._project / ".work/checkpoints").rglob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def _lost(self, failed: str) -> Iterator[str]:
        """Yield whether more than one checkpoint interval is lost."""
        saving = re.search(r"step-(\d{8})", failed)
        # without any checkpoint, it failed before the steps: outputs are probed
        ended = " results/train/" in failed and self._checkpoint()
        at = int(saving[1]) if saving else _STEPS if ended else 0
        if self.name == "train" and at - self._checkpoint() > _EVERY:
            yield f"the steps after {self._checkpoint()} are lost, it failed at {at}"


def _copy(source: Path, target: Path) -> None:
    """Copy everything that stages write."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("data", "results", "logs", ".work", ".trials"):
        shutil.rmtree(target / name, ignore_errors=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def _is_error(line: str) -> bool:
    return ": error: " in line and len(line) <= 300


def _load_lines(path: Path) -> None:
    assert all(json.loads(line) for line in path.read_text().splitlines())


_READERS: dict[str, Callable[[Path], object]] = {
    ".json": lambda path: json.loads(path.read_text()),
    ".jsonl": _load_lines,
    ".gz": lambda path: json.loads(gzip.decompress(path.read_bytes())),
    ".safetensors": load_file,
    ".zip": lambda path: zipfile.ZipFile(path).testzip(),
    ".html": lambda path: path.read_text().index("</html>"),
    ".svg": lambda path: path.read_text().index("</svg>"),
}


def _is_whole(path: Path) -> bool:
    try:
        _READERS.get(path.suffix, lambda path: path.read_bytes()[0])(path)
    except Exception:
        return False
    return True


def tried(calls: int, most: int, generator: random.Random) -> list[int]:
    """Return the numbers of the calls to fail: all, or one of each of `most` equal ranges."""
    if calls <= most:
        return [*range(1, calls + 1)]
    edges = [i * calls // most for i in range(most + 1)]
    return [generator.randint(a + 1, b) for a, b in pairwise(edges)]


def table(folder: Path, most: int, chosen: list[str]) -> bool:
    """Print a row for each stage and error; return whether there was a fault."""
    project = copy_project(folder / "project")
    timed = {"fsdp2-int8": {"engine": "fsdp2", "gradients": {"codec": "int8:group=128"}}}
    timings = {name: {"runs": "all", "repetitions": 3} for name in ("one-rank", "two-ranks")}
    timings["one-rank"] |= {"world_size": 1, "runs": [_RUN]}
    train = {"train__steps": _STEPS, "train__checkpoint": {"every": _EVERY}}
    runs = {"strategies": {_RUN: {"engine": "fsdp2"}}, "timed_strategies": timed}
    set_params(project, **runs, seeds=[0], timings=timings, **train)
    generator, faults = random.Random(0), False
    print(HEADING, flush=True)
    with shared_control() as control:
        for words in STAGES:
            stage = Stage(control, project, folder / "scratch", words)
            for number in ERRORS if not chosen or stage.name in chosen else ():
                row = Row(stage.name, errno.errorcode[number], stage.calls)
                for call in tried(stage.calls, most, generator):
                    stage.fail(call, number, row)
                print(row, *row.faults, sep="\n  ", flush=True)
                faults |= bool(row.faults)
            if {*chosen} and words[0] == [each[0] for each in STAGES if each[0] in chosen][-1]:
                break
    return faults


def main(most: int = 20, *chosen: str) -> None:
    """Print the table; fail if a fault was not one line, or harmed anything."""
    if VARIABLE in os.environ:
        sys.exit(table(Path(os.environ[VARIABLE]).parent, most, [*chosen]))
    with tempfile.TemporaryDirectory() as folder:
        own = preloaded(Path(folder, "control"))
        command = [sys.executable, "-m", "tests.faults.storage", str(most), *chosen]
        sys.exit(subprocess.run(command, env=own).returncode)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*map(int, arguments[:1]), *arguments[1:])
