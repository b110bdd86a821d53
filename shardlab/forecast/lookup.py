"""Lookup table of ways to synchronise replicas, by the ratio of synchronisation to computation.

Plain arithmetic of speed, from measured ratios. Nothing overlaps in it, and it judges no quality.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    arguments: str
    """of `shardlab.attach`, after the model"""


def lookup_table(codec: str = "int4", between_nodes: bool = False) -> list[Row]:
    """Return the ways to synchronise, the ones that change least of training first.

    Args:
        codec: the strongest compression.
        between_nodes: whether replicas are nodes, which shard the model inside.
    """
    key = "between_nodes" if between_nodes else "gradients"
    feedback = "" if between_nodes else ", error_feedback=True"
    outer = f'outer={{"codec": "{codec}"}}, optimizer=optimizer'
    rare = (
        Row(f"{codec} every {every} steps", codec, every, f", sync_every={every}, {outer}")
        for every in (8, 32, 128)
    )
    mild = [Row("int8 gradients", "int8", 1, f', {key}="int8"')] if codec != "int8" else []
    return [
        Row("stock data parallel", STOCK, 1, ""),
        *mild,
        Row(f"{codec} gradients", codec, 1, f', {key}="{codec}"{feedback}'),
        *rare,
    ]


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
