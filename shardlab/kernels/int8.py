"""Eight-bit integers with one scale per group.

Payload of n float32 elements in groups of G (the last group may be shorter), little-endian:

    bytes                  content
    2 * ceil(n / G)        scale of each group, bfloat16
    n                      code of each element, int8

An element decodes to `code * scale`, exactly representable in float32. The scales come first and
together, so that codes start at one offset and both parts are read in a straight line.

* scale = (largest magnitude of the group) / 127 in float32, raised to 2**-126 (the smallest normal
  number: no host flushes it to zero), rounded up to bfloat16: no code is clipped.
* code = x times the float32 reciprocal of the scale (one division per group), rounded to the
  nearest integer, ties to even.
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.

With a residual e, the elements encoded are p = x + e and the new residual is p - code * scale,
which float32 represents exactly: what is sent and what is kept add up to what was given. In a group
that decodes to NaN the residual stays as it was.
"""

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.operators import check_floats, check_payload, new_payload, register

_NOT_FINITE = 0x7FC0
_TOO_LARGE = 2.0**127
_SMALLEST_SCALE = 2.0**-126


def payload_bytes(n: int, group: int) -> int:
    """Bytes that n elements take."""
    return 2 * -(-n // group) + n


def encode(x: Tensor, group: int, payload: Tensor | None = None) -> Tensor:
    """The payload of `x`.

    Args:
        x: float32 [n], contiguous.
        group: elements that share one scale, at least 1.
        payload: uint8 [payload_bytes(n, group)] to write to; a new one by default.
    """
    payload = new_payload(payload_bytes(x.numel(), group), x) if payload is None else payload
    _encode(x, group, payload)
    return payload


def encode_residual(
    x: Tensor, residual: Tensor, group: int, payload: Tensor | None = None
) -> Tensor:
    """The payload of `x + residual`; what it loses becomes the new `residual`, in place.

    Args:
        x: float32 [n], contiguous.
        residual: float32 [n], contiguous; no part of the memory of `x`.
        group: elements that share one scale, at least 1.
        payload: uint8 [payload_bytes(n, group)] to write to; a new one by default.
    """
    payload = new_payload(payload_bytes(x.numel(), group), x) if payload is None else payload
    _encode_residual(x, residual, group, payload)
    return payload


def decode_add(payload: Tensor, group: int, out: Tensor, alpha: float = 1.0) -> None:
    """`out += alpha * decoded payload`, with alpha rounded to float32; out is float32 [n]."""
    _decode_add(payload, group, out, alpha)


def encode_reference(x: Tensor, group: int, payload: Tensor) -> None:
    """`encode` in PyTorch."""
    scales, codes = _quantize(x, group)
    border = payload_bytes(x.numel(), group) - x.numel()
    payload[:border] = scales.view(torch.uint8)
    payload[border:] = codes.view(torch.uint8)


def encode_residual_reference(x: Tensor, residual: Tensor, group: int, payload: Tensor) -> None:
    """`encode_residual` in PyTorch."""
    wanted = x + residual
    encode_reference(wanted, group, payload)
    decoded = _dequantize(payload, group, x.numel())
    residual.copy_(torch.where(decoded.isnan(), residual, wanted - decoded))


def decode_add_reference(payload: Tensor, group: int, out: Tensor, alpha: float) -> None:
    """`decode_add` in PyTorch."""
    out += _dequantize(payload, group, out.numel()) * alpha


def _quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales as the bits of bfloat16, int16 [ceil(n / group)], and codes, int8 [n]."""
    padding = -x.numel() % group
    rows = torch.nn.functional.pad(x, (0, padding)).view(-1, group)
    largest = rows.abs().amax(1)
    # by a tensor: some devices divide by a number through its reciprocal, which rounds twice
    scale = (largest / torch.full_like(largest, 127.0)).clamp_min(_SMALLEST_SCALE)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    bits = bits.masked_fill(largest == 0, 0).masked_fill(~(largest < _TOO_LARGE), _NOT_FINITE)
    scale = (bits << 16).view(torch.float32)[:, None]
    reciprocal = torch.where(scale > 0, scale, 1.0).reciprocal()
    codes = torch.where(scale > 0, rows * reciprocal, 0.0).round()
    return bits.to(torch.int16), codes.to(torch.int8).view(-1)[: x.numel()]


def _dequantize(payload: Tensor, group: int, n: int) -> Tensor:
    border = payload.numel() - n
    # a copy, since slices of larger messages may start at odd addresses
    bits = payload[:border].clone().view(torch.int16).to(torch.int32)
    scale = (bits << 16).view(torch.float32).repeat_interleave(group)[:n]
    return payload[border:].view(torch.int8).to(torch.float32) * scale


def _run_encode(x: Tensor, group: int, payload: Tensor) -> None:
    check_floats(x=x)
    _check(payload, group, x)
    if (library := native.library()) is None or x.device.type != "cpu":
        return encode_reference(x, group, payload)
    return library.int8_encode(x.data_ptr(), x.numel(), group, payload.data_ptr())


def _run_encode_residual(x: Tensor, residual: Tensor, group: int, payload: Tensor) -> None:
    check_floats(x=x, residual=residual)
    _check(payload, group, x)
    if (library := native.library()) is None or x.device.type != "cpu":
        return encode_residual_reference(x, residual, group, payload)
    return library.int8_encode_residual(
        x.data_ptr(), residual.data_ptr(), x.numel(), group, payload.data_ptr()
    )


def _run_decode_add(payload: Tensor, group: int, out: Tensor, alpha: float) -> None:
    check_floats(out=out)
    _check(payload, group, out)
    if (library := native.library()) is None or out.device.type != "cpu":
        return decode_add_reference(payload, group, out, alpha)
    return library.int8_decode_add(payload.data_ptr(), out.numel(), group, alpha, out.data_ptr())


def _check(payload: Tensor, group: int, values: Tensor) -> None:
    if group < 1:
        raise ValueError(f"group must be at least 1 (found {group})")
    check_payload(payload, payload_bytes(values.numel(), group), values)


_encode = register("int8_encode(Tensor x, int group, Tensor(a!) payload) -> ()", _run_encode)
_encode_residual = register(
    "int8_encode_residual(Tensor x, Tensor(a!) residual, int group, Tensor(b!) payload) -> ()",
    _run_encode_residual,
)
_decode_add = register(
    "int8_decode_add(Tensor payload, int group, Tensor(a!) out, float alpha) -> ()",
    _run_decode_add,
)
