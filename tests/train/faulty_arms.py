"""Faults of arms in a race, on real ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardlab.config.strategy import Strategy
from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, StepOutcome
from shardlab.train import timing_runner as runner

Fault = Callable[[int, nn.Module], None]
"""called before each step of the faulty arm, with the number of the step and the model"""


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # the thread has ended since
            found.update(task.read_text().split())
    return found


@pytest.fixture
def faulty(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Strategy, Fault], dict[str, int]]]:
    """A function that gives the engine of a strategy a fault; no process outlives the test.

    It returns the number of engines that the rank which asks has.
    """
    before, build = children(), runner.build_engine

    def give(strategy: Strategy, fault: Fault) -> dict[str, int]:
        counted = {"engines": 0}

        def built(model: nn.Module, built_for: Strategy, *arguments: Any) -> Engine:
            engine = build(model, built_for, *arguments)
            counted["engines"] += 1
            numbers, step = iter(range(1000)), engine.step
            if built_for is strategy:

                def faulty_step(*of: Any) -> StepOutcome:
                    fault(next(numbers), model)
                    return step(*of)

                monkeypatch.setattr(engine, "step", faulty_step)
            return engine

        monkeypatch.setattr(runner, "build_engine", built)
        return counted

    yield give
    assert children() <= before


def on_rank(rank: int, at: int, fault: Callable[[], None]) -> Fault:
    def faulty_step(number: int, model: nn.Module) -> None:
        if number == at and os.environ["LOCAL_RANK"] == str(rank):
            fault()

    return faulty_step


def raises() -> None:
    raise ArithmeticError("wrong on purpose")


def refuses() -> None:
    raise UserError("too large on purpose")


def memory() -> None:
    raise MemoryError("too much on purpose")


@torch.no_grad()
def poison(number: int, model: nn.Module) -> None:
    if number == 4:
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
