"""The memory of a step of the slide engine, in closed form.

With P parameters, R of them in the root and G in the largest unit, b bytes for a number that the
device computes with and l for one of a gradient that leaves it, K slots, and W ranks on the node:

- the device holds b (K G + R) of parameters, and l (2 G + R) for gradients that leave; beside them
  the gradients that autograd makes, b G in backward of a unit and b R at its end, and activations
  and logits as `shardlab.memory.step` has them. None of it depends on the number of layers but what
  is kept of each for backward;
- host memory holds, for all ranks of the node, parameters, 4 P, where b is less than 4 a mirror of
  them, b P, moments and gradients; of what is frozen b bytes for each parameter and nothing else.
  Where gradients or moments are meant, here and above, P, R and G are of what is trained alone;
- with m bytes for a moment, moments are 2 m P; on disk they take as much there, and host memory
  holds those of three units: one is updated, one comes and one leaves;
- gradients arrive in V vectors: one for each rank that copies them whole (V = W, `cpu_reduce`), or
  one for all (V = 1). With a single micro-batch and nothing to wait for they are applied where they
  arrive, in slots that units share: V l (3 G + R). Where they wait for the norm of all they stay as
  they arrive: V l P. Several micro-batches are added up in float32 beside those slots: each rank
  its own, V 4 P, or, where they are reduced one by one, each rank its part of the sum, 4 P for all.
"""

from collections.abc import Sequence
from typing import Literal

from shardlab.strategy.settings import Settings

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FLOAT = DTYPE_BYTES["fp32"]
_SLOTS = 3
"""one that is filled, one that is applied, and one since ranks are not equally far"""
_HELD = 3
"""units whose moments are not on disk alone"""


def window_slots(full: Settings, units: int) -> int:
    """K, by a canonical form: there is no use for more of them than there are units."""
    assert full.window is not None
    return min(full.window, units)


def window_bytes(full: Settings, element_bytes: int, root: int, units: Sequence[int]) -> int:
    """Of parameters on the device, by a canonical form; `root` and `units` are elements."""
    return element_bytes * (window_slots(full, len(units)) * max(units, default=0) + root)


def leaving_bytes(
    full: Settings, element_bytes: int, root: int, units: Sequence[int], world_size: int
) -> int:
    """Of gradients that leave the device; `root` and `units` are elements that are trained."""
    elements = min(2, len(units)) * max(units, default=0) + root
    return landed_bytes(full, element_bytes, world_size) * elements


Keeping = Literal["nothing", "arrived", "sums", "totals"]
"""which gradients stay in host memory until they are applied: none, as they are applied where they
arrive; all as they arrive; what each rank adds up of its own; what each adds up of its part of what
ranks have reduced"""


def keeping(full: Settings, accumulation: int | None, holding: bool) -> Keeping:
    """By a canonical form.

    Args:
        accumulation: micro-batches of a step, where that is known.
        holding: gradients wait until the norm of all is known.
    """
    reduced = full.grad_sync == "gpu_reduce"
    if accumulation == 1 and not holding:
        return "nothing"
    if accumulation == 1 and (reduced or not full.reduce_every_micro_batch):
        return "arrived"
    return "totals" if reduced or full.reduce_every_micro_batch else "sums"


def landing_sizes(root: int, units: Sequence[int]) -> list[int]:
    """Elements of the slots that units share, the first for the root alone."""
    return [root, *min(_SLOTS, len(units)) * [max(units, default=0)]]


def copied_whole(full: Settings, world_size: int) -> int:
    """Vectors of gradients that arrive: one for each rank, or one of which each has its part."""
    return world_size if full.grad_sync == "cpu_reduce" else 1


def in_host_memory(
    full: Settings,
    element_bytes: int,
    root: int,
    units: Sequence[int],
    world_size: int,
    accumulation: int | None,
    holding: bool,
    frozen: int,
) -> dict[str, int]:
    """Bytes of a node, by what they are for.

    Args:
        root, units: elements that are trained.
        frozen: elements that are not.
    """
    parameters = root + sum(units)
    held = parameters if full.moments == "memory" else sum(sorted([root, *units])[-_HELD:])
    mirror = 0 if element_bytes == _FLOAT else element_bytes
    vectors, landed = copied_whole(full, world_size), landed_bytes(full, element_bytes, world_size)
    slots = vectors * landed * sum(landing_sizes(root, units))
    gradients = {
        "nothing": slots,
        "arrived": vectors * landed * parameters,
        "sums": vectors * _FLOAT * parameters + slots,
        "totals": _FLOAT * parameters + slots,
    }
    return {
        "parameters": (_FLOAT + mirror) * parameters + element_bytes * frozen,
        "moments": 2 * DTYPE_BYTES[full.moment_dtype] * held,
        "gradients": gradients[keeping(full, accumulation, holding)],
    }


def landed_bytes(full: Settings, element_bytes: int, world_size: int) -> int:
    """Of a number of a gradient that arrives in host memory."""
    sums = full.gradients.plain() and full.gradients.route == "native"
    if world_size == 1 or (full.grad_sync == "cpu_reduce" and sums):
        return element_bytes
    return DTYPE_BYTES[full.reduce_dtype]
