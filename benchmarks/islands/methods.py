"""Ways to train that are compared, in the order in which they are trained."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardlab.config.parameters import Parameters
from shardlab.strategy.document import Strategy
from shardlab.strategy.sync import Sync

FOLDER = Path("experiments/islands")
PARAMS = Path("params/islands.yaml")
TARGET = "stock"
"""method whose loss after `TARGET_STEPS` the others have to reach"""
TARGET_STEPS = 2000
STOCK = ("ddp", "ddp-bf16")
"""what torch has itself, and computes the same up to rounding. FSDP2 is left out: gloo's
reduce-scatter is an all-reduce, so that it sends 1.9 times as much as DDP"""


class Method(NamedTuple):
    """A way to train. Runs of each length have their own end of the schedule."""

    strategy: str
    """in params/islands.yaml"""
    steps: int = TARGET_STEPS
    """length of the runs that tune it: about that which ends at the loss to reach"""
    tuned_as: str | None = None
    """method of nearly the same updates, whose learning rate it takes"""
    world_size: int = 2
    accumulation: int = 1
    """micro-batches per step"""
    same_as: str | None = None
    """method whose runs it shares: ranks times micro-batches are equal, and so are the samples of
    each step and, up to rounding, the losses"""


METHODS = {
    # of the engines of torch the one that trains fastest on loopback
    TARGET: Method("ddp"),
    "one-device": Method("ddp", 4000, world_size=1),
    "one-device-acc2": Method("ddp", world_size=1, accumulation=2, same_as=TARGET),
    "one-device-acc8": Method("ddp", 500, world_size=1, accumulation=8, same_as="stock-acc4"),
    "one-device-acc16": Method("ddp", 350, world_size=1, accumulation=16, same_as="stock-acc8"),
    "diloco32-warm": Method("diloco32-warm"),
    "diloco32": Method("diloco32"),
    "stock-acc4": Method("ddp", 500, accumulation=4),
    "stock-acc8": Method("ddp", 350, accumulation=8),
    "diloco128-warm": Method("diloco128-warm", tuned_as="diloco32-warm"),
    "ddp-int4": Method("ddp-int4", tuned_as=TARGET),
    "ddp-int4-acc4": Method("ddp-int4", 500, tuned_as="stock-acc4", accumulation=4),
    "ddp-int4-acc8": Method("ddp-int4", 350, tuned_as="stock-acc8", accumulation=8),
    "manual-int4-w4": Method("manual-int4-w4", tuned_as=TARGET),
    "streaming32-warm": Method("streaming32-warm", tuned_as="diloco32-warm"),
    "diloco128": Method("diloco128", tuned_as="diloco32"),
    "average8": Method("average8", tuned_as="diloco32"),
    "diloco32-fp32": Method("diloco32-fp32", tuned_as="diloco32"),
    "sparse32-warm": Method("sparse32-warm", tuned_as="diloco32-warm"),
    "ddp-topk": Method("ddp-topk", tuned_as=TARGET),
    "ddp-topk-kept": Method("ddp-topk-kept", tuned_as=TARGET),
    "ddp-topk-dense-first": Method("ddp-topk-dense-first", tuned_as=TARGET),
    "ddp-powersgd": Method("ddp-powersgd", tuned_as=TARGET),
    "manual-int8-w8": Method("manual-int8-w8", tuned_as=TARGET),
    "ddp-int8": Method("ddp-int8", tuned_as=TARGET),
    "diloco32-int8": Method("diloco32-int8", tuned_as="diloco32"),
    "diloco128-fp32": Method("diloco128-fp32", tuned_as="diloco32"),
    "diloco32-published": Method("diloco32-published", tuned_as="diloco32"),
    # two nodes of two ranks
    "hsdp": Method("hsdp", 1000, world_size=4),
    "hsdp-int8": Method("hsdp-int8", 1000, tuned_as="hsdp", world_size=4),
    "hsdp32-warm": Method("hsdp32-warm", 1000, tuned_as="hsdp", world_size=4),
    "ddp-int4-four": Method("ddp-int4", 1000, tuned_as="hsdp", world_size=4),
    "stock-acc32": Method("ddp", 175, accumulation=32),
}
"""in the order in which they are trained: what matters most comes first"""

TARGET_LENGTHS = (2800, 4000)
"""further lengths of the target: what others lose at equal steps, by the length of the run"""
LARGER = ("stock", "ddp-int4", "diloco32", "diloco32-warm", "manual-int4-w4", "one-device")
"""methods whose ranking is checked with a larger model, once"""
LARGER_STEPS = 600


@cache
def parameters(larger: bool = False) -> Parameters:
    """Return the parameters of the experiment, or those of the check with a larger model."""
    return Parameters(PARAMS, ["model.preset=6x256"] if larger else [])


def steps_of_equal_tokens(name: str, target_steps: int) -> int:
    """Return the steps in which a method sees the tokens of so many steps of the target."""
    method, target = METHODS[name], METHODS[TARGET]
    tokens = target.world_size * target.accumulation * target_steps
    return tokens // (method.world_size * method.accumulation)


def strategies() -> dict[str, Strategy]:
    """Return the strategies by name."""
    params = parameters()
    return {**params("strategies"), **params("timed_strategies")}


def sync_of(name: str) -> Sync | None:
    """Return how a method synchronises parameters; None where it reduces every gradient."""
    return strategies()[METHODS[name].strategy].sync


def timed_as(strategy: str) -> str:
    """Return the strategy whose steps those of a strategy are after its warm-up."""
    plain = strategy.removesuffix("-warm").removesuffix("-published")
    return plain if plain in strategies() else strategy
