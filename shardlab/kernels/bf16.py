"""bfloat16: the upper half of float32, rounded.

Payload of n float32 elements: n bfloat16 of 2 bytes each, little-endian.

* Rounded to the nearest, ties to even; magnitudes above the largest bfloat16 become infinity.
* NaN stays NaN: its sign and upper payload bits are kept, the quiet bit is set.

With a residual e, the elements encoded are p = x + e and the new residual is p minus its decoded
value, which float32 represents exactly. Where that is not finite the residual stays as it was.
"""

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.operators import check_floats, check_payload, new_payload, register


def payload_bytes(n: int) -> int:
    """Bytes that n elements take."""
    return 2 * n


def encode(x: Tensor, payload: Tensor | None = None) -> Tensor:
    """The payload of `x`.

    Args:
        x: float32 [n], contiguous.
        payload: uint8 [2 n] to write to; a new one by default.
    """
    payload = new_payload(payload_bytes(x.numel()), x) if payload is None else payload
    _encode(x, payload)
    return payload


def encode_residual(x: Tensor, residual: Tensor, payload: Tensor | None = None) -> Tensor:
    """The payload of `x + residual`; what it loses becomes the new `residual`, in place.

    Args:
        x: float32 [n], contiguous.
        residual: float32 [n], contiguous; no part of the memory of `x`.
        payload: uint8 [2 n] to write to; a new one by default.
    """
    payload = new_payload(payload_bytes(x.numel()), x) if payload is None else payload
    _encode_residual(x, residual, payload)
    return payload


def decode_add(payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """`out += alpha * decoded payload`, with alpha rounded to float32; out is float32 [n]."""
    _decode_add(payload, out, alpha)


def encode_reference(x: Tensor, payload: Tensor) -> None:
    """`encode` in PyTorch."""
    # PyTorch's own NaN differs between its vector and scalar code
    quiet = ((x.view(torch.int32) >> 16) | 0x0040).to(torch.int16)
    words = torch.where(x.isnan(), quiet, x.to(torch.bfloat16).view(torch.int16))
    payload.copy_(words.view(torch.uint8))


def encode_residual_reference(x: Tensor, residual: Tensor, payload: Tensor) -> None:
    """`encode_residual` in PyTorch."""
    wanted = x + residual
    encode_reference(wanted, payload)
    rest = wanted - _widen(payload)
    residual.copy_(torch.where(rest.isfinite(), rest, residual))


def decode_add_reference(payload: Tensor, out: Tensor, alpha: float) -> None:
    """`decode_add` in PyTorch."""
    out += _widen(payload) * alpha


def _widen(payload: Tensor) -> Tensor:
    # a copy, since slices of larger messages may start at odd addresses
    return payload.clone().view(torch.bfloat16).to(torch.float32)


def _run_encode(x: Tensor, payload: Tensor) -> None:
    check_floats(x=x)
    check_payload(payload, payload_bytes(x.numel()), x)
    if (library := native.library()) is None or x.device.type != "cpu":
        return encode_reference(x, payload)
    return library.bf16_encode(x.data_ptr(), x.numel(), payload.data_ptr())


def _run_encode_residual(x: Tensor, residual: Tensor, payload: Tensor) -> None:
    check_floats(x=x, residual=residual)
    check_payload(payload, payload_bytes(x.numel()), x)
    if (library := native.library()) is None or x.device.type != "cpu":
        return encode_residual_reference(x, residual, payload)
    return library.bf16_encode_residual(
        x.data_ptr(), residual.data_ptr(), x.numel(), payload.data_ptr()
    )


def _run_decode_add(payload: Tensor, out: Tensor, alpha: float) -> None:
    check_floats(out=out)
    check_payload(payload, payload_bytes(out.numel()), out)
    if (library := native.library()) is None or out.device.type != "cpu":
        return decode_add_reference(payload, out, alpha)
    return library.bf16_decode_add(payload.data_ptr(), out.numel(), alpha, out.data_ptr())


_encode = register("bf16_encode(Tensor x, Tensor(a!) payload) -> ()", _run_encode)
_encode_residual = register(
    "bf16_encode_residual(Tensor x, Tensor(a!) residual, Tensor(b!) payload) -> ()",
    _run_encode_residual,
)
_decode_add = register(
    "bf16_decode_add(Tensor payload, Tensor(a!) out, float alpha) -> ()", _run_decode_add
)
