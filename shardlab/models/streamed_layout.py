"""Layout of streamed states: slots and vectors that engine `slide` allocates, and that predictions
of memory and of a step count."""

from collections.abc import Sequence
from typing import Literal

from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.settings import DTYPE_BYTES

_HOST_SLOTS = 3
"""one that is filled, one that is applied, and one because ranks do not progress alike"""


KeptGradients = Literal["nothing", "arrived", "sums"]
"""gradients that stay in host memory until they are applied: none, since they are applied where
they arrive; all as they arrive; each rank's sum over micro-batches, in float32"""


def kept_gradients(accumulation: int | None, holding: bool) -> KeptGradients:
    """Return which gradients stay in host memory until they are applied.

    Args:
        accumulation: number of micro-batches of a step, where that is known.
        holding: gradients wait until the norm of all of them is known.
    """
    if accumulation != 1:
        return "sums"
    return "arrived" if holding else "nothing"


def window_slots(strategy: CanonicalStrategy, units: int) -> int:
    """Return K: more slots than units would never be used."""
    assert strategy.window is not None
    return min(strategy.window, units)


def slot_sizes(root: int, units: Sequence[int]) -> list[int]:
    """Return the elements of each slot for gradients in host memory.

    The first is for the root alone; units share the others.
    """
    return [root, *min(_HOST_SLOTS, len(units)) * [max(units, default=0)]]


def gradient_vectors(strategy: CanonicalStrategy, world_size: int) -> int:
    """Return how many whole vectors of gradients arrive on a node: one per rank, or W chunks."""
    return world_size if strategy.grad_sync == "cpu_reduce" else 1


def gradient_bytes(strategy: CanonicalStrategy, element_bytes: int, world_size: int) -> int:
    """Return the bytes of an element of a gradient that arrives in host memory."""
    native = strategy.gradients.plain() and strategy.gradients.route == "native"
    if world_size == 1 or (strategy.grad_sync == "cpu_reduce" and native):
        return element_bytes
    return DTYPE_BYTES[strategy.reduce_dtype]
