"""The memory of a rank in a training step, in closed form.

What lives at the moments of a step at which most can be alive, of which the fullest is the peak;
bytes per rank. With P parameters, R of them in the root and G in the largest unit; b is 4 for
float32 and 2 for bf16 and fp16; k units are gathered ahead:

- states and error feedback: see `shardlab.memory.states`. Gradients of `ddp` (in buckets) and
  of `manual` stay between steps, those of the others come with backward;
- gathered: b R and what is kept after forward; while a unit computes b G (1 + k) more, with `fsdp2`
  once more for the buffer that all-gather fills, which stays until the next one is filled or
  forward ends (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py);
- accumulation: b P for the whole gradients of earlier micro-batches, where only the last one's are
  reduced;
- gradients on their way: b G as autograd makes them and as much in `reduce_dtype` to be reduced,
  with `manual` two such vectors and one of the root's size that stay;
- activations, per token and block of width h, feed-forward width f, q for queries and v for keys
  and values each: 4 h + 2 q + 2 v + w f elements, the 16 h of Korthikanti et al. 2022 (section 4.1,
  without dropout and without the attention matrix, which fused attention does not keep) for
  w = 2; an activation function made of elementary operations has a larger w. Selective
  checkpointing keeps 3 h + 2 q + 2 v + f, full checkpointing h, and one block is computed again.
  With `activations` elsewhere h of three blocks stays: of the last, and of two on their way;
- logits: when backward begins, b T V bytes, and 12 T V of float32 for the logarithms of their
  softmax and for the gradients of both.

What is frozen has no gradients, moments and error feedback; activations are counted as if backward
needed them all. What `slide` has instead of states and gathered parameters is in
`shardlab.buffers.slide`. Payloads of codecs are left out: at most what the vector of a unit
takes, and back.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shardlab.buffers.slide import (
    DTYPE_BYTES,
    in_host_memory,
    leaving_bytes,
    window_bytes,
)
from shardlab.memory.states import state_bytes
from shardlab.strategy.strategy import Strategy

_FLOAT = 4
_INPUTS_LEFT = 3

Categories = dict[str, int]
"""bytes by what they are for"""


class UnitShape(NamedTuple):
    """What is gathered together."""

    elements: int
    trained: int
    """of the elements"""
    kept: bool
    """between forward and backward"""
    element_bytes: int
    """while it computes"""


class Sizes(NamedTuple):
    """What memory depends on beside the strategy."""

    parameters: int
    trained: int
    """of the parameters"""
    units: tuple[UnitShape, ...]
    """all but the root"""
    element_bytes: int
    """of what the root computes in"""
    checkpointing: tuple[str, ...]
    """of every block"""
    width: int
    queries: int
    keys: int
    """elements per token, and as many of the values"""
    feed_forward: int
    wide: int
    """tensors of the feed-forward width that backward needs"""
    vocabulary: int
    tokens: int
    """of a micro-batch of one rank"""
    accumulation: int
    """micro-batches of a step"""
    holding: bool
    """gradients wait until the norm of all is known"""

    @property
    def root(self) -> int:
        """Elements."""
        return self.parameters - sum(unit.elements for unit in self.units)

    @property
    def trained_root(self) -> int:
        """Elements of the root that are trained."""
        return self.trained - sum(unit.trained for unit in self.units)

    def trained_units(self) -> list[int]:
        """Elements of the units that are trained at all."""
        return [unit.trained for unit in self.units if unit.trained]


def closed_form(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """What is alive at the fullest moment of a step, on the device that computes.

    Where that is the CPU, what the slide engine keeps in host memory comes to it.
    """
    full = strategy.canonical()
    states = state_bytes(full, sizes.trained, world_size)
    states["parameters"] = state_bytes(full, sizes.parameters, world_size)["parameters"]
    if full.offload:
        states = dict.fromkeys(states, 0)
    elif full.engine == "slide":
        states |= dict.fromkeys(("parameters", "gradients", "moments"), 0)
    moments = _moments(full, sizes, states, world_size)
    fullest = max(moments, key=lambda each: sum(each.values()))
    return {name: size for name, size in fullest.items() if size}


def host_memory(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """What the slide engine keeps beside the device, for one of the ranks that share it."""
    full = strategy.canonical()
    if full.engine != "slide":
        return {}
    node = in_host_memory(
        *(full, sizes.element_bytes, sizes.trained_root, sizes.trained_units()),
        *(world_size, sizes.accumulation, sizes.holding, sizes.parameters - sizes.trained),
    )
    return {name: size // world_size for name, size in node.items()}


def _moments(full: Strategy, sizes: Sizes, states: Categories, world_size: int) -> list[Categories]:
    """End of forward, begin of backward, its first and its last block, its end."""
    early = sizes.accumulation > 1 and full.reduce_every_micro_batch
    stays = full.engine in ("ddp", "manual") or early
    before = {**states, "gradients": states["gradients"] if stays else 0}
    activations, of_block = _activations(full, sizes)
    computing, kept, backward = _gathered(full, sizes)
    unit, root = _on_their_way(full, sizes)
    vectors = _vectors(full, sizes, world_size)
    logits = sizes.tokens * sizes.vocabulary
    at_once = {"gathered": backward, "communication": vectors + unit}
    before["accumulated"] = _held(full, sizes)
    return [
        before
        | {"gathered": computing, "activations": activations, "communication": vectors}
        | {"logits": logits * sizes.element_bytes},
        before
        | {"gathered": kept, "activations": activations, "communication": vectors}
        | {"logits": logits * (sizes.element_bytes + 3 * _FLOAT)},
        before | at_once | {"activations": activations + of_block},
        states | at_once | {"activations": of_block},
        states | {"gathered": _of_root(full, sizes), "communication": vectors + root},
    ]


def _activations(full: Strategy, sizes: Sizes) -> tuple[int, int]:
    """Kept for backward, and what backward makes of the block in work: again, and gradients."""
    attention = 2 * sizes.queries + 2 * sizes.keys
    everything = 4 * sizes.width + attention + sizes.wide * sizes.feed_forward
    kept = {
        "none": everything,
        "selective": 3 * sizes.width + attention + sizes.feed_forward,
        "full": sizes.width,
    }
    token = sizes.tokens * sizes.element_bytes
    ends = 2 * sizes.width  # the last normalisation
    of_blocks = sum(kept[mode] for mode in sizes.checkpointing)
    if full.activations != "device":
        inputs = sum(mode != "none" for mode in sizes.checkpointing)
        of_blocks -= sizes.width * (inputs - min(inputs, _INPUTS_LEFT))
    again = max((everything - kept[mode] for mode in sizes.checkpointing), default=0)
    return token * (of_blocks + ends), token * (again + 2 * sizes.feed_forward)


def _gathered(full: Strategy, sizes: Sizes) -> tuple[int, int, int]:
    """While the last unit computes, when backward begins, and in backward of the largest unit."""
    if full.engine == "slide":
        window = window_bytes(
            full, sizes.element_bytes, sizes.root, [unit.elements for unit in sizes.units]
        )
        return window, window, window
    root = _of_root(full, sizes)
    if _holds_all(full):
        return root, root, root
    kept = root + sum(unit.elements * unit.element_bytes for unit in sizes.units if unit.kept)
    freed = _largest(unit.elements * unit.element_bytes for unit in sizes.units if not unit.kept)
    buffer = 0
    if full.engine == "fsdp2":
        buffer = freed if sizes.units else root
    return kept + freed + buffer, kept, kept + freed * (1 + full.depths()[1]) + min(buffer, freed)


def _of_root(full: Strategy, sizes: Sizes) -> int:
    """What all of forward and backward computes with, beside the parameters that a rank holds."""
    if _holds_all(full) and sizes.element_bytes == _FLOAT:
        return 0
    # autocast keeps narrow copies of all weights until backward is over
    elements = sizes.parameters if full.engine == "ddp" else sizes.root
    return elements * sizes.element_bytes


def _holds_all(full: Strategy) -> bool:
    return full.engine == "ddp" or (full.engine == "fsdp1" and full.sharding == "no_shard")


def _on_their_way(full: Strategy, sizes: Sizes) -> tuple[int, int]:
    """Gradients of the largest unit in work, and of the root."""
    if full.engine == "ddp":
        return 0, 0
    reduced = 0 if full.engine in ("manual", "slide") else DTYPE_BYTES[full.reduce_dtype]
    unit = _largest(unit.trained * (unit.element_bytes + reduced) for unit in sizes.units)
    root = sizes.trained_root * (sizes.element_bytes + reduced)
    return unit, root


def _vectors(full: Strategy, sizes: Sizes, world_size: int) -> int:
    """What `manual` and `slide` keep to collect gradients in."""
    if full.engine == "slide":
        root, units = sizes.trained_root, sizes.trained_units()
        return leaving_bytes(full, sizes.element_bytes, root, units, world_size)
    if full.engine != "manual":
        return 0
    largest = _largest(unit.elements for unit in sizes.units)
    return (min(2, len(sizes.units)) * largest + sizes.root) * DTYPE_BYTES[full.reduce_dtype]


def _held(full: Strategy, sizes: Sizes) -> int:
    """Gradients of micro-batches before the last, whole on every rank."""
    if full.engine in ("ddp", "slide") or sizes.accumulation == 1 or full.reduce_every_micro_batch:
        return 0
    # fsdp2 adds them up in the type that reduces
    summed = DTYPE_BYTES[full.reduce_dtype] if full.engine == "fsdp2" else 0
    return sizes.trained * max(sizes.element_bytes, summed)


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
