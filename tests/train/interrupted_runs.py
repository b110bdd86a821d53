"""Runs that are killed at random: what must not depend on it."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from unittest.mock import patch

import psutil

from shardlab.core.files import read_json_lines
from shardlab.train.launch import RunFailed
from shardlab.train.loop import Loop
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from tests.commands import wait_for


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


def kill_a_rank(
    plan: RunPlan, target: Path, root: Path, step: int, ready: Callable[[], bool], pause_s: float
) -> int:
    """Start a run and kill a rank once it is `ready` after a step; return the last step begun."""
    fork = multiprocessing.get_context("fork")
    steps = fork.Value("i", -1)
    process = fork.Process(target=_train, args=(plan, target, root, steps))
    process.start()
    try:
        wait_for(lambda: steps.value >= step and ready(), pause_s=0.0005)
        time.sleep(pause_s)
        psutil.Process(process.pid).children()[0].kill()
        process.join(60)
        assert process.exitcode == 1, f"ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return int(steps.value)


def _train(plan: RunPlan, target: Path, root: Path, steps: "Synchronized[int]") -> None:
    micro_batches = Loop.micro_batches

    def noting(loop):
        steps.value = loop.step
        return micro_batches(loop)

    with patch.object(Loop, "micro_batches", noting):
        try:
            train_run(plan, target, checkpoints=root)
        except RunFailed:
            sys.exit(1)
