"""Faults of arms in a race, on real ranks."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, StepOutcome
from shardlab.strategy.document import Strategy
from shardlab.train import loop

Fault = Callable[[int, nn.Module], None]
"""called before each step of the faulty arm, with the number of the step and the model"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Strategy, Fault], None]:
    """A function that gives the engine of a strategy a fault."""
    build = loop.build_engine

    def give(strategy: Strategy, fault: Fault) -> None:
        def built(model: nn.Module, built_for: Strategy, *arguments: Any) -> Engine:
            engine = build(model, built_for, *arguments)
            numbers, step = iter(range(1000)), engine.step

            def faulty_step(*of: Any) -> StepOutcome:
                fault(next(numbers), model)
                return step(*of)

            # the loop has settled the accumulation
            if built_for.model_copy(update={"accumulation": strategy.accumulation}) == strategy:
                monkeypatch.setattr(engine, "step", faulty_step)
            return engine

        monkeypatch.setattr(loop, "build_engine", built)

    return give


def on_rank(rank: int, at: int, fault: Callable[[], None]) -> Fault:
    def faulty_step(number: int, model: nn.Module) -> None:
        if number == at and os.environ["LOCAL_RANK"] == str(rank):
            fault()

    return faulty_step


def raises() -> None:
    raise ArithmeticError("wrong on purpose")


def refuses() -> None:
    raise UserError("too large on purpose")


@torch.no_grad()
def poison(number: int, model: nn.Module) -> None:
    if number == 4:
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
