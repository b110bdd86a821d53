"""Memory of a rank in a training step, in closed form.

The peak is the fullest of the moments of a step at which most can be alive. With P parameters, R of
them in the root and G in the largest unit, N ranks and C copies of the model; b is 4 for float32
and 2 for bf16 and fp16; k units are gathered ahead. Bytes per rank:

- replicated and sharded states: parameters 4 P, gradients 4 P, the two moments of AdamW 8 P, for a
  matrix that Muon trains the one 4 P, times C / N (Rajbhandari et al. 2020, ZeRO, section 3.1, for
  float32 weights). Where gradients are in buckets or in a pool they stay between steps, elsewhere
  backward allocates them;
- error feedback: 2 B P with B bytes per residual (4, 2 or 1 + 2/128 as fp32, bf16 or int8), since
  each rank keeps what it did not send of its whole gradient, and what that was a step ago; where
  states are replicated also 2 B P / N for the sums that each rank owns;
- rare exchanges: 8 P C / N for outer parameters and momentum, 8 P (C + 1) / N with error feedback,
  and 4 P C / N for the gradients of all fragments that are on the way during a delay;
- gathered: b R and what stays after forward; while a unit computes b G (1 + k) more, with an
  all-gather buffer once more, which stays until the next one is filled or forward ends
  (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py);
- accumulation: b P for the whole gradients of earlier micro-batches, where only the last one's are
  reduced;
- gradients that are being reduced: b G as autograd makes them and as much in `reduce_dtype`; a pool
  has two such vectors and one of the root's size;
- activations, per token and block of width h, n elements of normalisations, a of queries, keys,
  values and what attention returns, and u that the first products of its feed-forward network
  give: n + a + 2 u elements, the 16 h of Korthikanti et al. 2022 (section 4.1, without dropout)
  with two normalisations of torch, n = 4 h. What is made of elementary operations stores more:
  n = 6 h for the normalisations of Llama, and some activation functions add tensors. Dropout adds
  2 h, for both branches. With a gate u is twice the width of the network. Fused attention stores no
  matrix, other attention, on a CPU also that with dropout, 3 T elements per head for T tokens of a
  sequence. Selective checkpointing stores 3 h + a + u, full checkpointing h, and one block is
  recomputed.
  With `activations` off the device h of three blocks stays: of the last, and of two that are
  being copied;
- logits: when backward begins, b T V bytes, and 12 T V of float32 for the logarithms of their
  softmax and for the gradients of both.

Streamed states lie in host memory, where the ranks of a node share them, and the device has a
window of K slots for units, each as large as the largest, and memory for the root. With l bytes of
an element of a gradient that arrives in host memory and m of a moment, bytes per node:

- parameters 4 P; where b is less than 4 also a mirror of them, b P; frozen parameters b each;
- moments 2 m P;
- gradients arrive in V vectors: one per rank (V = N) or one for all (V = 1). Where they are applied
  as they arrive: V l (3 G + R) for slots that units share. Where they wait for the global norm:
  V l P. Several micro-batches are summed in float32 beside those slots: 4 V P.

Frozen parameters have no gradients, moments and error feedback; activations are counted as if
backward needed them all. Payloads of codecs are left out: at most the size of a unit's vector, and
back.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from shardlab.models.block_shape import BlockShape
from shardlab.models.streamed_layout import (
    gradient_bytes,
    gradient_vectors,
    kept_gradients,
    slot_sizes,
    window_slots,
)
from shardlab.strategy.document import CanonicalStrategy, Strategy
from shardlab.strategy.settings import DTYPE_BYTES
from shardlab.strategy.sync import Sync

Categories = dict[str, int]
"""bytes by category: parameters, gradients, moments, outer, residuals, gathered, communication,
activations, logits, accumulated"""


class UnitShape(NamedTuple):
    """Size of a unit, which is gathered in one collective."""

    elements: int
    trained: int
    """number of elements that are trained"""
    kept: bool
    """gathered parameters stay between forward and backward"""
    element_bytes: int
    """of an element that computes"""


class Sizes(NamedTuple):
    """Sizes of a model and of a rank's step."""

    parameters: int
    trained: int
    """number of parameters that are trained"""
    units: tuple[UnitShape, ...]
    """all but the root"""
    element_bytes: int
    """of an element of the root that computes"""
    checkpointing: tuple[str, ...] = ()
    """of every block"""
    width: int = 0
    """elements per token between blocks"""
    blocks: tuple[BlockShape, ...] = ()
    """as many as `checkpointing` has"""
    vocabulary: int = 0
    tokens: int = 0
    """of a micro-batch of one rank"""
    sequence_length: int = 0
    accumulation: int = 1
    """number of micro-batches of a step"""
    matrices: int = 0
    """number of parameters that Muon trains, with one moment"""
    holding: bool = True
    """gradients wait until the norm of all of them is known"""

    @property
    def root(self) -> int:
        """Number of elements that belong to no unit."""
        return self.parameters - sum(unit.elements for unit in self.units)

    @property
    def trained_root(self) -> int:
        """Number of elements of the root that are trained."""
        return self.trained - sum(unit.trained for unit in self.units)

    def trained_units(self) -> list[int]:
        """Return the trained elements of each unit that has some."""
        return [unit.trained for unit in self.units if unit.trained]


_POOLED = 2
"""vectors of units whose gradients are reduced, or leave the device, at a time"""
_FLOAT = DTYPE_BYTES["fp32"]
_RESIDUAL = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128}


def _sharded_states(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of the states of a rank, by category: with `offload` in host memory."""
    replicas = full.replica_count(world_size)
    trained = _FLOAT * sizes.trained * replicas // world_size
    states = {
        "parameters": _FLOAT * sizes.parameters * replicas // world_size,
        "gradients": trained,
        "moments": 2 * trained - _FLOAT * sizes.matrices * replicas // world_size,
    }
    if full.sync is None:
        return states
    # outer parameters and momentum
    states["outer"] = 2 * trained
    return {**states, "exchanged": int(_sync_buffers(full.sync, replicas) * trained)}


def _sync_buffers(sync: Sync, replicas: int) -> float:
    """Return how many times a rank has its trained parameters for messages of exchanges: what error
    feedback keeps, now and before the last exchange, and gradients on the way."""
    residuals = 2 * (1 + 1 / replicas) if sync.error_feedback else 0
    on_the_way = min(math.ceil(sync.delay * sync.fragments / sync.every), sync.fragments)
    return residuals + on_the_way / sync.fragments


def _streamed_states(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of streamed states in the host memory of a node, by category."""
    mirror = 0 if sizes.element_bytes == _FLOAT else sizes.element_bytes
    frozen = sizes.parameters - sizes.trained
    moments = 2 * DTYPE_BYTES[full.moment_dtype] * sizes.trained
    vectors = gradient_vectors(full, world_size)
    arriving = vectors * gradient_bytes(full, sizes.element_bytes, world_size)
    slots = arriving * sum(slot_sizes(sizes.trained_root, sizes.trained_units()))
    gradients = {
        "sums": vectors * _FLOAT * sizes.trained + slots,
        "arrived": arriving * sizes.trained,
        "nothing": slots,
    }
    return {
        "parameters": (_FLOAT + mirror) * sizes.trained + sizes.element_bytes * frozen,
        "moments": 0 if full.moments == "disk" else moments,
        "gradients": gradients[kept_gradients(sizes.accumulation, sizes.holding)],
    }


def _residuals(full: CanonicalStrategy, trained: int, world_size: int) -> int:
    if not full.gradients.error_feedback:
        return 0
    owned = trained // world_size if full.traits.residency == "replicated" else 0
    return int(2 * _RESIDUAL[full.gradients.residual] * (trained + owned))


CUBLAS_WORKSPACE = 32 << 20
"""of a GPU of Hopper's generation, others take less (aten/src/ATen/cuda/CublasHandlePool.cpp)"""
_INPUTS_LEFT = 3
_OF_MATRIX = 3
"""elements that backward needs per element of an attention matrix: its softmax in float32, and in
the narrow type of the product (transformers, `eager_attention_forward`)"""


def device_memory(strategy: Strategy, sizes: Sizes, world_size: int, on_gpu: bool) -> Categories:
    """Return the bytes that a step of a rank needs of its GPU, or of the host where it computes on
    a CPU: states that are off-loaded or streamed included."""
    arguments = strategy, sizes, world_size
    rest = {"workspace": CUBLAS_WORKSPACE} if on_gpu else host_memory(*arguments)
    return closed_form(*arguments) | rest


def closed_form(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes alive at the fullest moment of a step, on the device that computes.

    Where that is the CPU, `host_memory` is to be added.
    """
    full = strategy.canonical()
    in_host_memory = full.offload or full.traits.residency == "streamed"
    states = dict.fromkeys(("parameters", "gradients", "moments"), 0)
    if not in_host_memory:
        states = _sharded_states(full, sizes, world_size)
    # with `offload` error feedback has nothing on the device either
    if full.sync is not None and full.sync.state == "host":
        states.pop("outer", None)
    states["residuals"] = 0 if full.offload else _residuals(full, sizes.trained, world_size)
    moments = _moments(full, sizes, states, world_size)
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in fullest.items() if size}


def host_memory(strategy: Strategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of a rank's off-loaded states, or of its part of streamed ones that a node
    shares."""
    full = strategy.canonical()
    if full.offload:
        return _sharded_states(full, sizes, world_size)
    if full.sync is not None and full.sync.state == "host":
        return {"outer": _sharded_states(full, sizes, world_size)["outer"]}
    if full.traits.residency != "streamed":
        return {}
    node = _streamed_states(full, sizes, world_size)
    return {name: size // world_size for name, size in node.items()}


def _moments(
    full: CanonicalStrategy, sizes: Sizes, states: Categories, world_size: int
) -> list[Categories]:
    """Return bytes at the end of forward, then of backward at its begin, in its first and its last
    block, and at its end."""
    stays = full.traits.gradients_stay
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
    width, modes, blocks = sizes.width, sizes.checkpointing, sizes.blocks
    attention = [_attention(block, sizes.sequence_length) for block in blocks]
    everything = [
        block.normalised + of_attention + block.wide
        for block, of_attention in zip(blocks, attention, strict=True)
    ]
    kept = [
        {"none": all_of, "full": width}.get(mode, 3 * width + of_attention + block.expanded)
        for block, mode, all_of, of_attention in zip(
            blocks, modes, everything, attention, strict=True
        )
    ]
    token, ends = sizes.tokens * sizes.element_bytes, 2 * width  # the last normalisation
    of_blocks = sum(kept)
    if full.activations != "device":
        inputs = sum(mode != "none" for mode in modes)
        of_blocks -= width * (inputs - min(inputs, _INPUTS_LEFT))
    again = _largest(
        all_of - of_block + 2 * block.feed_forward
        for block, all_of, of_block in zip(blocks, everything, kept, strict=True)
    )
    return token * (of_blocks + ends), token * again


def _attention(block: BlockShape, sequence_length: int) -> int:
    """Return the elements per token that backward needs of attention."""
    matrix = block.heads * sequence_length * _OF_MATRIX
    return block.queries + block.attended + block.keys + block.values + matrix


def _gathered(full: CanonicalStrategy, sizes: Sizes) -> tuple[int, int, int]:
    """Return bytes while the last unit computes, as backward begins, and in its largest unit."""
    if full.traits.residency == "streamed":
        slots = window_slots(full, len(sizes.units))
        largest = _largest(unit.elements for unit in sizes.units)
        window = sizes.element_bytes * (slots * largest + sizes.root)
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
        units, root = sizes.trained_units(), sizes.trained_root
        width = gradient_bytes(full, sizes.element_bytes, world_size)
    else:
        units, root = [unit.elements for unit in sizes.units], sizes.root
        width = DTYPE_BYTES[full.reduce_dtype]
    return (min(_POOLED, len(units)) * _largest(units) + root) * width


def _accumulated(full: CanonicalStrategy, sizes: Sizes) -> int:
    """Return bytes of gradients of micro-batches before the last, whole on every rank."""
    sharded = full.traits.residency == "sharded"
    if not sharded or sizes.accumulation == 1:
        return 0
    summed = DTYPE_BYTES[full.reduce_dtype] if full.traits.accumulates_in_reduce_dtype else 0
    return sizes.trained * max(sizes.element_bytes, summed)


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
