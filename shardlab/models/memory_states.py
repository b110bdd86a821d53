"""Closed form of model states: parameters, gradients, moments and error feedback.

With P parameters, N ranks and C copies of the model, bytes per rank:

- replicated and sharded states: parameters 4 P, gradients 4 P, the two moments of AdamW 8 P, times
  C / N (Rajbhandari et al. 2020, ZeRO, section 3.1, for float32 weights);
- error feedback: 2 B P with B bytes per residual (4, 2 or 1 + 2/128 as fp32, bf16 or int8), since
  each rank keeps what it did not send of its whole gradient, and what that was a step ago; where
  states are replicated also 2 B P / N for the sums that each rank owns.

Streamed states lie in host memory, where the ranks of a node share them. R and G are the trained
elements of the root and of the largest unit, b the bytes of an element that the device computes
with, l those of an element of a gradient that arrives, m those of a moment. Bytes per node:

- parameters 4 P; where b is less than 4 also a mirror of them, b P; frozen parameters b each;
- moments 2 m P;
- gradients arrive in V vectors: one per rank (V = N) or one for all (V = 1). Where they are applied
  as they arrive: V l (3 G + R) for slots that units share. Where they wait for the global norm:
  V l P. Several micro-batches are summed in float32 beside those slots: 4 V P.
"""

from shardlab.config.settings import DTYPE_BYTES
from shardlab.config.strategy import CanonicalStrategy
from shardlab.models.memory_sizes import Categories, Sizes
from shardlab.models.slide_buffers import (
    gradient_bytes,
    gradient_vectors,
    kept_gradients,
    slot_sizes,
)

_FLOAT = DTYPE_BYTES["fp32"]
_RESIDUAL = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128}


def device_states(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes that a rank keeps where it computes, by category."""
    residuals = _residuals(full, sizes.trained, world_size)
    if full.offload:
        return dict.fromkeys(("parameters", "gradients", "moments", "residuals"), 0)
    if full.traits.residency == "streamed":
        return {"parameters": 0, "gradients": 0, "moments": 0, "residuals": residuals}
    return {**sharded_states(full, sizes, world_size), "residuals": residuals}


def sharded_states(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of the states of a rank, by category: with `offload` in host memory."""
    copies = full.copies(world_size)
    trained = _FLOAT * sizes.trained * copies // world_size
    return {
        "parameters": _FLOAT * sizes.parameters * copies // world_size,
        "gradients": trained,
        "moments": 2 * trained,
    }


def host_states(full: CanonicalStrategy, sizes: Sizes, world_size: int) -> Categories:
    """Return the bytes of streamed states in the host memory of a node, by category."""
    root, units = sizes.trained_root, sizes.trained_units()
    mirror = 0 if sizes.element_bytes == _FLOAT else sizes.element_bytes
    frozen = sizes.parameters - sizes.trained
    vectors = gradient_vectors(full, world_size)
    arriving = vectors * gradient_bytes(full, sizes.element_bytes, world_size)
    slots = arriving * sum(slot_sizes(root, units))
    gradients = {
        "nothing": slots,
        "arrived": arriving * sizes.trained,
        "sums": vectors * _FLOAT * sizes.trained + slots,
    }
    return {
        "parameters": (_FLOAT + mirror) * sizes.trained + sizes.element_bytes * frozen,
        "moments": 2 * DTYPE_BYTES[full.moment_dtype] * sizes.trained,
        "gradients": gradients[kept_gradients(sizes.accumulation, sizes.holding)],
    }


def _residuals(full: CanonicalStrategy, trained: int, world_size: int) -> int:
    if not full.gradients.error_feedback:
        return 0
    owned = trained // world_size if full.traits.residency == "replicated" else 0
    return int(2 * _RESIDUAL[full.gradients.residual] * (trained + owned))
