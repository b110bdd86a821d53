"""Runs that are killed at random and resumed, compared with uninterrupted runs.

    python -m benchmarks.resume [--times N] [--steps S] [--seed K] [--data FOLDER] [--work FOLDER]

Every other kill waits for a checkpoint that is being written. The engines, with and without a
codec, and the formats of checkpoints take turns. The runs are of the tiny preset on two ranks.
"""

import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
from torch import Tensor

from benchmarks.common import DATA, WORK, arguments, print_table, write_results
from shardlab.config.model_and_data import Model
from shardlab.config.schema import Checkpoint, Train
from shardlab.config.strategy import parse_strategy
from shardlab.core.files import read_json_lines
from shardlab.core.progress import say
from shardlab.train.checkpoint_folder import Folder, damage_in
from shardlab.train.launch import RunFailed
from shardlab.train.loop import Loop
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run

_INT4 = {"codec": "int4:group=64", "error_feedback": True}
STRATEGIES: list[dict[str, Any]] = [
    {"engine": engine, **({"gradients": gradients} if gradients else {})}
    for engine, gradients in product(("ddp", "fsdp1", "fsdp2", "manual"), (None, _INT4))
]
FORMATS: list[dict[str, Any]] = [
    {"format": "full"},
    {"format": "sharded"},
    {"format": "sharded", "asynchronous": True},
]
_EVERY = 2
_LONGEST_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """Results of a run that must not depend on interruptions."""

    curve: list[tuple[float, float]]
    """loss and gradient norm of every step"""
    weights: bytes

    @classmethod
    def read(cls, folder: Path) -> "Outcome":
        """Read them from the folder of a finished run."""
        events = read_json_lines(folder / "events.jsonl")
        curve = [(event["loss"], event["gradient_norm"]) for event in events]
        return cls(curve, (folder / "final_model/model.safetensors").read_bytes())


@dataclass(frozen=True)
class Interruption:
    """One killed run and its resumption."""

    case: str
    killed_in: int
    """number of the step, counted from 1, in or after which it was"""
    in_a_save: bool
    resumed_after: int
    losses_equal: bool
    weights_equal: bool
    left: list[str]
    """names of what the resumed run did not remove"""


def main() -> None:
    args = arguments(__doc__, times=20, steps=24, seed=(0, "of the moments"), data=DATA, work=WORK)
    chance = random.Random(args.seed)
    plans = [_plan(args.data, strategy, args.steps) for strategy in STRATEGIES]
    rows = []
    with TemporaryDirectory(prefix="shardlab-resume-") as work:
        straight = cache(lambda index: run_straight(plans[index], Path(work, f"straight{index}")))
        cases = cycle(product(FORMATS, range(len(plans))))
        for number, (options, index) in zip(range(args.times), cases, strict=False):
            folder, in_a_save = Path(work, str(number)), number % 2 == 1
            rows.append(
                interrupt(plans[index], options, straight(index), folder, chance, in_a_save)
            )
            say(f"benchmarks: {number + 1} of {args.times}: {rows[-1]}")
    write_results(args.work / "resume.json", rows=[vars(row) for row in rows])
    _print(rows)
    sys.exit(not all(row.losses_equal and row.weights_equal and not row.left for row in rows))


def _plan(data: Path, strategy: dict[str, Any], steps: int) -> RunPlan:
    train = Train(steps=steps, batch_size=4, sequence_length=32, audit_steps=0, profiled_steps=1)
    return RunPlan("resume", 0, parse_strategy(strategy), train, Model(preset="tiny"), data)


def run_straight(plan: RunPlan, target: Path) -> Outcome:
    """Run without interruptions and checkpoints."""
    _start(plan, target).join()
    return Outcome.read(target)


def interrupt(
    plan: RunPlan,
    options: dict[str, Any],
    straight: Outcome,
    work: Path,
    chance: random.Random,
    in_a_save: bool,
) -> Interruption:
    """Kill one rank of a run, resume it, and compare with the uninterrupted run.

    Args:
        options: of the checkpoints.
        in_a_save: wait until a checkpoint is being written.
    """
    checkpoint = Checkpoint(every=_EVERY, **options)
    plan = replace(plan, train=plan.train.model_copy(update={"checkpoint": checkpoint}))
    target, root = work / "run", work / "checkpoints"
    folder, steps = Folder(root), multiprocessing.get_context("fork").Value("i", -1)
    with _killed(_start(plan, target, root, steps)) as run:
        step = chance.randrange(1, plan.train.steps - 2 * _EVERY)
        _wait(lambda: steps.value >= step)
        if in_a_save:
            _wait(lambda: any(root.glob(".step-*.partial")))
        time.sleep(chance.uniform(0, 0.02))
        chance.choice(run.children()).kill()
    killed_in = steps.value + 1
    for whole in map(folder.path, folder.steps()):
        assert damage_in(whole) is None, "a killed run left a damaged checkpoint"
    unfinished = list(root.glob(".step-*.partial"))
    resumed_after = max(folder.steps(), default=0)
    _start(plan, target, root).join()
    outcome = Outcome.read(target)
    left = [str(path) for path in [root, *work.rglob(".*")] if path.exists()]
    return Interruption(
        _words(plan, checkpoint),
        killed_in,
        bool(unfinished),
        resumed_after,
        outcome.curve == straight.curve,
        outcome.weights == straight.weights,
        left,
    )


def _start(
    plan: RunPlan, target: Path, root: Path | None = None, steps: Any = None
) -> multiprocessing.context.ForkProcess:
    """Start the run in a separate process, whose children are its ranks."""
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(plan, target, root, steps)
    )
    process.start()
    return process


def _train(plan: RunPlan, target: Path, root: Path | None, steps: "Synchronized[int]") -> None:
    micro_batches = Loop.micro_batches

    def noting(loop: Loop) -> list[Tensor]:
        if steps is not None:
            steps.value = loop.step
        return micro_batches(loop)

    with patch.object(Loop, "micro_batches", noting):
        try:
            train_run(plan, target, checkpoints=root)
        except RunFailed:
            sys.exit(1)


@contextmanager
def _killed(process: multiprocessing.context.ForkProcess) -> Iterator[psutil.Process]:
    """Start a run, of which the block kills a rank."""
    try:
        yield psutil.Process(process.pid)
        process.join(_LONGEST_S)
        assert process.exitcode == 1, f"ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {_LONGEST_S} s"
        time.sleep(0.0005)


def _words(plan: RunPlan, checkpoint: Checkpoint) -> str:
    how = " asynchronous" if checkpoint.asynchronous else ""
    return f"{plan.strategy.label()}; {checkpoint.format}{how}"


def _print(rows: list[Interruption]) -> None:
    headings = [
        "case",
        "killed in step",
        "while a checkpoint was written",
        "resumed after step",
        "losses equal bit for bit",
        "weights equal bit for bit",
        "left over",
    ]
    cells = [
        [
            row.case,
            str(row.killed_in),
            _yes(row.in_a_save),
            str(row.resumed_after),
            _yes(row.losses_equal),
            _yes(row.weights_equal),
            ", ".join(row.left) or "nothing",
        ]
        for row in rows
    ]
    print_table("Resumed runs", headings, cells)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    main()
