"""Lookup table of ways to synchronise replicas, by the ratio of synchronisation to computation.

Plain arithmetic of speed, from measured ratios. Nothing overlaps in it, and it judges no quality.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardlab.strategy.document import parse_strategy

GOAL = 0.1
"""share of a step that synchronisation may take"""
STOCK = "all-reduce"
"""torch's own, uncompressed; no codec has that name"""


class Row(NamedTuple):
    """One way to synchronise replicas: a row of the lookup table."""

    use: str
    codec: str
    """of what is sent, or `STOCK`"""
    every: int
    """steps from one synchronisation to the next"""
    document: Mapping[str, Any]
    """strategy, as in params.yaml"""

    @property
    def attach(self) -> str | None:
        """The lines for a script; None where torch does it alone."""
        return parse_strategy(self.document, self.use).canonical().attach_call()


def lookup_table(codec: str = "int4", nodes: int = 1, feedback: bool = True) -> list[Row]:
    """Return the ways to synchronise, the ones that change least of training first.

    Args:
        codec: the strongest compression.
        nodes: replicas, each of which shards the model inside; 1: each rank is a replica.
        feedback: whether the strongest compression of every step has error feedback.
    """
    base: dict[str, Any] = {"engine": "ddp"}
    mild, strong = {"codec": "int8"}, {"codec": codec, "error_feedback": feedback}
    if nodes > 1:
        base = {"sharding": "hybrid_shard", "replicas": nodes}
        mild, strong = {"between_nodes": "int8"}, {"between_nodes": codec}
    rows = [
        Row("stock data parallel", STOCK, 1, base),
        Row("int8 gradients", "int8", 1, {**base, "gradients": mild}),
        Row(f"{codec} gradients", codec, 1, {**base, "gradients": strong}),
    ]
    if codec == "int8":
        del rows[1]
    for every in (8, 32, 128):
        sync = {"every": every, "codec": codec}
        rows.append(Row(f"{codec} every {every} steps", codec, every, {**base, "sync": sync}))
    return rows


def share(ratio: float) -> float:
    """Return the share of a step that synchronisation takes where nothing overlaps."""
    return ratio / (1 + ratio)


def advise(ratios: Mapping[str, float], table: Sequence[Row], goal: float = GOAL) -> Row:
    """Return the first row by which synchronisation takes at most the share `goal` of a step; where
    there is none, the one by which it takes least.

    Args:
        ratios: seconds of a synchronisation over those of a step's computation, by codec.
    """
    enough = (row for row in table if share(ratios[row.codec] / row.every) <= goal)
    return next(enough, min(table, key=lambda row: ratios[row.codec] / row.every))


def steps_between(ratio: float, goal: float) -> int:
    """Return how many steps between exchanges let them take at most the share `goal` of the time.

    Args:
        ratio: seconds of an exchange over those of a step's computation.
    """
    # rounded, since 19.000000000000004 steps are 19
    return max(1, math.ceil(round(ratio * (1 - goal) / goal, 9)))
