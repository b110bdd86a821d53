"""Runs that are killed at random and resumed, compared with uninterrupted runs."""

import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from torch import Tensor

from shardlab.config.schema import Checkpoint
from shardlab.core.files import read_json_lines
from shardlab.train.checkpoint_folder import Folder, damage_in
from shardlab.train.launch import RunFailed
from shardlab.train.loop import Loop
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run

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

    killed_in: int
    """number of the step, counted from 1, in or after which it was"""
    resumed_after: int
    losses_equal: bool
    weights_equal: bool
    left: list[str]
    """names of what the resumed run did not remove"""


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
    resumed_after = max(folder.steps(), default=0)
    _start(plan, target, root).join()
    outcome = Outcome.read(target)
    left = [str(path) for path in [root, *work.rglob(".*")] if path.exists()]
    return Interruption(
        killed_in,
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
