"""The memory of a step of the slide engine, in closed form.

With P parameters, R of them in the root and G in the largest unit, b bytes for a number that the
device computes with and l for one of a gradient that leaves it, K slots, and W ranks on the node:

- the device holds b (K G + R) of parameters, and l (2 G + R) for gradients that leave; beside them
  the gradients that autograd makes, b G in backward of a unit and b R at its end, and activations
  and logits as `shardlab.core.memory` has them. None of it depends on the number of layers but what
  is kept of each for backward;
- main memory holds, for all ranks of the node, parameters, 4 P, where b is less than 4 a mirror of
  them, b P, and gradients: l P for each rank whose gradients are copied whole (`cpu_reduce`), or
  l P for all. With m bytes for a moment, those are 2 m P; on disk they take as much there, and main
  memory holds those of three units: one is updated, one comes and one leaves.
"""

from collections.abc import Sequence

from shardlab.core.settings import Settings

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FLOAT = DTYPE_BYTES["fp32"]
_HELD = 3
"""units whose moments are not on disk alone"""


def window_bytes(full: Settings, element_bytes: int, root: int, units: Sequence[int]) -> int:
    """Of parameters on the device, by a normal form; `root` and `units` are elements."""
    slots = min(full.window or 2, len(units))
    return element_bytes * (slots * max(units, default=0) + root)


def leaving_bytes(
    full: Settings, element_bytes: int, root: int, units: Sequence[int], world_size: int
) -> int:
    """Of gradients that leave the device."""
    elements = min(2, len(units)) * max(units, default=0) + root
    return _landed(full, element_bytes, world_size) * elements


def in_main_memory(
    full: Settings, element_bytes: int, root: int, units: Sequence[int], world_size: int
) -> dict[str, int]:
    """Bytes of a node, by what they are for; `root` and `units` are elements."""
    parameters = root + sum(units)
    held = parameters if full.moments == "memory" else sum(sorted([root, *units])[-_HELD:])
    slots = world_size if full.grad_sync == "cpu_reduce" else 1
    mirror = 0 if element_bytes == _FLOAT else element_bytes
    return {
        "parameters": (_FLOAT + mirror) * parameters,
        "moments": 2 * DTYPE_BYTES[full.moment_dtype] * held,
        "gradients": slots * _landed(full, element_bytes, world_size) * parameters,
    }


def _landed(full: Settings, element_bytes: int, world_size: int) -> int:
    """Bytes of a number of a gradient on its way."""
    sums = full.gradients.plain() and full.gradients.route == "native"
    if world_size == 1 or (full.grad_sync == "cpu_reduce" and sums):
        return element_bytes
    return DTYPE_BYTES[full.reduce_dtype]
