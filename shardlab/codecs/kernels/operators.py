"""Kernels as PyTorch operators, which profiles, dispatch modes and compilers know by name."""

from collections.abc import Callable

import torch
from torch import Tensor

# The plain registration rather than `torch.library.custom_op`: it costs 2 us per call, not 18, and
# an engine makes one call for each message.
_LIBRARY = torch.library.Library("shardlab", "FRAGMENT")


def register(schema: str, kernel: Callable[..., None]) -> Callable[..., None]:
    """Register and return the operator `shardlab::NAME`, where `schema` is `NAME(arguments) -> ()`.

    All outputs of a kernel are arguments that it writes to, so its fake does nothing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardlab::{name}", lambda *_: None, lib=_LIBRARY)
    operator: Callable[..., None] = getattr(torch.ops.shardlab, name).default
    return operator


def check_floats(**vectors: Tensor | None) -> None:
    """Refuse all but contiguous float32 vectors of one length and device: kernels get addresses.

    Args:
        vectors: by the name for messages; None is skipped.

    Raises:
        ValueError: names the vector and what it is instead.
    """
    given = {name: vector for name, vector in vectors.items() if vector is not None}
    first_name, first = next(iter(given.items()))
    for name, vector in given.items():
        if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous float32 vector, not {vector.dtype} of shape "
                f"{tuple(vector.shape)} and strides {vector.stride()}"
            )
        if vector.numel() != first.numel() or vector.device != first.device:
            raise ValueError(f"{name} must have the length and device of {first_name}")


def check_payload(payload: Tensor, size: int, like: Tensor) -> None:
    """Refuse a buffer that is no contiguous uint8 vector of `size` bytes on the device of `like`.

    Raises:
        ValueError: what it is instead.
    """
    if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
        raise ValueError(
            f"payload must be a contiguous uint8 vector of {size} bytes, not {payload.dtype} of "
            f"shape {tuple(payload.shape)} and strides {payload.stride()}"
        )
    if payload.device != like.device:
        raise ValueError(f"payload is on {payload.device}, the values on {like.device}")


def new_payload(size: int, like: Tensor) -> Tensor:
    """Return an uninitialized buffer of `size` bytes on the device of `like`."""
    return torch.empty(size, dtype=torch.uint8, device=like.device)
