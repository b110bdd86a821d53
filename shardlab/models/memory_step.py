"""Closed form of the memory of a rank in a training step.

The peak is the fullest of the moments of a step at which most can be alive. With P parameters, R of
them in the root and G in the largest unit; b is 4 for float32 and 2 for bf16 and fp16; k units are
gathered ahead; bytes per rank:

- states and error feedback: see `shardlab.models.memory_states`. Where gradients are in buckets or in a
  pool they stay between steps, elsewhere backward allocates them;
- gathered: b R and what is kept after forward; while a unit computes b G (1 + k) more, with an
  all-gather buffer once more, which stays until the next one is filled or forward ends
  (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py);
- streamed: a window of units in place of what is gathered, see `shardlab.models.slide_buffers`. It
  does not depend on the number of layers;
- accumulation: b P for the whole gradients of earlier micro-batches, where only the last one's are
  reduced;
- gradients that are being reduced: b G as autograd makes them and as much in `reduce_dtype`; a pool
  has two such vectors and one of the root's size;
- activations, per token and block of width h, feed-forward width f, q for queries and v for keys
  and values each: 4 h + 2 q + 2 v + w f elements, the 16 h of Korthikanti et al. 2022 (section 4.1,
  without dropout and without the attention matrix, which fused attention does not keep) for
  w = 2; an activation function made of elementary operations has a larger w. Selective
  checkpointing keeps 3 h + 2 q + 2 v + f, full checkpointing h, and one block is recomputed.
  With `activations` off the device h of three blocks stays: of the last, and of two that are
  being copied;
- logits: when backward begins, b T V bytes, and 12 T V of float32 for the logarithms of their
  softmax and for the gradients of both.

Frozen parameters have no gradients, moments and error feedback; activations are counted as if
backward needed them all. Payloads of codecs are left out: at most the size of a unit's vector, and
back.
"""

from collections.abc import Iterable

from shardlab.config.settings import DTYPE_BYTES
from shardlab.config.strategy import CanonicalStrategy, Strategy
from shardlab.models.memory_sizes import Categories, Sizes
from shardlab.models.memory_states import device_states, host_states, sharded_states
from shardlab.models.slide_buffers import offload_bytes, window_bytes

CUBLAS_WORKSPACE = 32 << 20
"""of a GPU of Hopper's generation, others take less (aten/src/ATen/cuda/CublasHandlePool.cpp)"""
_FLOAT = DTYPE_BYTES["fp32"]
_INPUTS_LEFT = 3


def device_memory(strategy: Strategy, sizes: Sizes, world_size: int, on_gpu: bool) -> Categories:
    """Return the bytes that a step of a rank needs of its GPU, or of the host where it computes on
    a CPU: states that are off-loaded or streamed included."""
    given = strategy, sizes, world_size
    rest = {"workspace": CUBLAS_WORKSPACE} if on_gpu else host_memory(*given)
    return closed_form(*given) | rest


def closed_form(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes alive at the fullest moment of a step, on the device that computes.

    Where that is the CPU, `host_memory` is to be added.
    """
    full = strategy.canonical()
    moments = _moments(full, sizes, device_states(full, sizes, world_size), world_size)
    fullest = max(moments, key=lambda each: sum(each.values()))
    return {name: size for name, size in fullest.items() if size}


def host_memory(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of a rank's off-loaded states, or of its part of streamed ones that a node
    shares."""
    full = strategy.canonical()
    if full.offload:
        return sharded_states(full, sizes, world_size)
    if full.traits.residency != "streamed":
        return {}
    node = host_states(full, sizes, world_size)
    return {name: size // world_size for name, size in node.items()}


def _moments(
    full: CanonicalStrategy, sizes: Sizes, states: Categories, world_size: int
) -> list[Categories]:
    """Return bytes at the end of forward, then of backward at its begin, in its first and its last
    block, and at its end."""
    early = sizes.accumulation > 1 and full.reduce_every_micro_batch
    stays = full.traits.gradients_stay or early
    before = {**states, "gradients": states["gradients"] if stays else 0}
    activations, of_block = _activations(full, sizes)
    computing, kept, backward = _gathered(full, sizes)
    unit, root = _reduced(full, sizes)
    vectors = _vectors(full, sizes, world_size)
    logits = sizes.tokens * sizes.vocabulary
    at_once = {"gathered": backward, "communication": vectors + unit}
    before["accumulated"] = _accumulated(full, sizes)
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


def _activations(full: CanonicalStrategy, sizes: Sizes) -> tuple[int, int]:
    """Return bytes kept for backward, and bytes that backward of one block recomputes and adds."""
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


def _gathered(full: CanonicalStrategy, sizes: Sizes) -> tuple[int, int, int]:
    """Return bytes while the last unit computes, as backward begins, and in its largest unit."""
    if full.traits.residency == "streamed":
        units = [unit.elements for unit in sizes.units]
        window = window_bytes(full, sizes.element_bytes, root=sizes.root, units=units)
        return window, window, window
    root = _of_root(full, sizes)
    if _computes_in_place(full):
        return root, root, root
    kept = root + sum(unit.elements * unit.element_bytes for unit in sizes.units if unit.kept)
    freed = _largest(unit.elements * unit.element_bytes for unit in sizes.units if not unit.kept)
    buffer = 0
    if full.traits.all_gather_buffer:
        buffer = freed if sizes.units else root
    return kept + freed + buffer, kept, kept + freed * (1 + full.depths()[1]) + min(buffer, freed)


def _of_root(full: CanonicalStrategy, sizes: Sizes) -> int:
    """Return bytes of gathered or cast parameters that stay during forward and backward."""
    if _computes_in_place(full) and sizes.element_bytes == _FLOAT:
        return 0
    # autocast keeps narrow copies of all weights until backward is over
    elements = sizes.parameters if full.traits.autocast else sizes.root
    return elements * sizes.element_bytes


def _computes_in_place(full: CanonicalStrategy) -> bool:
    """Return whether a rank computes with the parameters that it keeps, not with a copy."""
    in_place = full.traits.no_shard_in_place and full.sharding == "no_shard"
    return in_place or full.traits.residency == "replicated"


def _reduced(full: CanonicalStrategy, sizes: Sizes) -> tuple[int, int]:
    """Return bytes of gradients that are being reduced, of the largest unit and of the root."""
    buffers = full.traits.gradient_buffers
    if buffers == "buckets":
        return 0, 0
    reduced = DTYPE_BYTES[full.reduce_dtype] if buffers == "temporary" else 0
    unit = _largest(unit.trained * (unit.element_bytes + reduced) for unit in sizes.units)
    root = sizes.trained_root * (sizes.element_bytes + reduced)
    return unit, root


def _vectors(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> int:
    """Return bytes of the pool of vectors that gradients are reduced in."""
    if full.traits.gradient_buffers != "pool":
        return 0
    if full.traits.residency == "streamed":
        return offload_bytes(
            full,
            sizes.element_bytes,
            root=sizes.trained_root,
            units=sizes.trained_units(),
            world_size=world_size,
        )
    largest = _largest(unit.elements for unit in sizes.units)
    return (min(2, len(sizes.units)) * largest + sizes.root) * DTYPE_BYTES[full.reduce_dtype]


def _accumulated(full: CanonicalStrategy, sizes: Sizes) -> int:
    """Return bytes of gradients of micro-batches before the last, whole on every rank."""
    sharded = full.traits.residency == "sharded"
    if not sharded or sizes.accumulation == 1 or full.reduce_every_micro_batch:
        return 0
    summed = DTYPE_BYTES[full.reduce_dtype] if full.traits.accumulates_in_reduce_dtype else 0
    return sizes.trained * max(sizes.element_bytes, summed)


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
