"""Sizes and rules of the slide engine's buffers, on the device and in host memory.

The device has a window of K slots for units, each as large as the largest, and memory for the root.
Gradients that leave the device arrive in host memory in slots that units share. There they are
applied at once, or kept for the rest of the step.

Strategies are canonical; `root` and `units` are numbers of elements; `element_bytes` is the size of
an element that the device computes with.
"""

from collections.abc import Sequence
from typing import Literal

from shardlab.config.settings import DTYPE_BYTES
from shardlab.config.strategy import CanonicalStrategy

_HOST_SLOTS = 3
"""one that is filled, one that is applied, and one because ranks do not progress alike"""
_LEAVING = 2
"""vectors of gradients that leave the device at a time"""

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


def window_bytes(
    strategy: CanonicalStrategy, element_bytes: int, root: int, units: Sequence[int]
) -> int:
    """Return the bytes of parameters on the device."""
    slots = window_slots(strategy, len(units))
    return element_bytes * (slots * max(units, default=0) + root)


def offload_bytes(
    strategy: CanonicalStrategy,
    element_bytes: int,
    root: int,
    units: Sequence[int],
    world_size: int,
) -> int:
    """Return the bytes of vectors on the device from which gradients leave it.

    Args:
        root, units: numbers of trained elements.
    """
    elements = min(_LEAVING, len(units)) * max(units, default=0) + root
    return gradient_bytes(strategy, element_bytes, world_size) * elements


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
