"""Signs with the mean magnitude of the message, summed by majority vote.

Payload of n float32 elements:

    bytes           content
    4               mean magnitude, float32
    ceil(n / 8)     bit of each element, in planes of 512 elements (`shardlab.codecs.kernels.grouped`)

Bits: `shardlab.codecs.kernels.signs`. The mean is the sum of the magnitudes divided by n, in float64,
rounded to float32: the sums of 512 elements each, in the lanes of `shardlab.codecs.kernels.signs`, are
folded in float64 (while there are m > 1 of them, number i + ceil(m / 2) is added to number i). It
is 0 where it would be below 2**-126, and NaN (0x7FC00000) where it is not finite: then every
element decodes to NaN.

One payload decodes to the mean times the sign. Several are a vote: (sum of the means) times the
sign of the sum of the signs, 0 for a tie; payloads whose mean is 0 have no vote.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.grouped import pack, unpack
from shardlab.codecs.kernels.native import FLOAT, INT, POINTER, address, addresses, function
from shardlab.codecs.kernels.operators import check_floats, check_payload, new_payload, register
from shardlab.codecs.kernels.parallel import for_ranges
from shardlab.codecs.kernels.signs import lane_sums

MAGNITUDE_BYTES = 4
_BLOCK = 512
_SMALLEST = 2.0**-126

_c_encode = function("sign_encode", POINTER, POINTER, INT, INT, INT, POINTER, POINTER)
_c_magnitude = function("sign_magnitude", POINTER, INT, POINTER)
_c_keep = function("sign_keep", POINTER, POINTER, POINTER, INT, INT, POINTER)
_c_decode = function("sign_decode", POINTER, INT, INT, INT, FLOAT, ctypes.c_int, POINTER)


def payload_bytes(n: int) -> int:
    """Return the size of the payload of n elements."""
    return MAGNITUDE_BYTES + (n + 7) // 8


def encode(x: Tensor, payload: Tensor | None = None) -> Tensor:
    """Return the payload of `x`, float32 [n], in `payload`, uint8 [payload_bytes(n)], if given."""
    payload = new_payload(payload_bytes(x.numel()), x) if payload is None else payload
    _encode(x, None, None, payload)
    return payload


def encode_residual(
    x: Tensor, residual: Tensor, kept: Tensor, payload: Tensor | None = None
) -> Tensor:
    """Return the payload of `x + residual`; write to `kept` what it loses.

    Two passes over memory, since what is lost depends on the mean of the whole message.

    Args:
        residual, kept: float32 [n], contiguous; `kept` may be `residual`. Where what is lost is not
            finite, `kept` is the old residual.
    """
    payload = new_payload(payload_bytes(x.numel()), x) if payload is None else payload
    _encode(x, residual, kept, payload)
    return payload


def decode_add(payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha * decoded payload` to `out`, float32 [n], with alpha rounded to float32."""
    _decode([payload], out, alpha, True)


def decode_votes(payloads: Sequence[Tensor], out: Tensor, alpha: float = 1.0) -> None:
    """Set `out` to `alpha * (sum of the means) * (sign of the sum of the signs)`."""
    _decode(list(payloads), out, alpha, False)


def encode_reference(
    x: Tensor, residual: Tensor | None, kept: Tensor | None, payload: Tensor
) -> None:
    """Run the operator `sign_encode` in PyTorch."""
    wanted = x if residual is None else x + residual
    full = x.numel() // _BLOCK * _BLOCK
    blocks = [wanted[:full].view(-1, _BLOCK), wanted[full:].view(1, -1)]
    sums = torch.cat([lane_sums(rows.abs()).flatten() for rows in blocks])
    magnitude = _mean(sums[: _blocks(x.numel())], x.numel())
    bits = [pack(rows < 0, 1).flatten() for rows in blocks]
    torch.cat([magnitude.view(torch.uint8), *bits], out=payload)
    if residual is not None and kept is not None:
        rest = wanted - torch.where(wanted < 0, -magnitude, magnitude)
        kept.copy_(torch.where(rest.isfinite(), rest, residual))


def decode_reference(payloads: Sequence[Tensor], out: Tensor, alpha: float, add: bool) -> None:
    """Run the operator `sign_decode` in PyTorch."""
    total = torch.zeros(1, device=out.device)
    votes = torch.zeros_like(out)
    for payload in payloads:
        magnitude, signs = _parts(payload, out.numel())
        total += magnitude
        votes += torch.where(magnitude == 0, 0.0, signs)
    # csrc/sign.cpp has no negative zero where all means are 0
    values = votes.sign() * (total * alpha + 0.0)
    if add:
        out += values
    else:
        out.copy_(values)


def _blocks(n: int) -> int:
    return max(1, -(-n // _BLOCK))


def _mean(sums: Tensor, n: int) -> Tensor:
    """Return the mean, float32 [1], from the sums of the blocks of n elements."""
    sums = sums.to(torch.float64)
    while len(sums) > 1:
        lower, upper = sums.split([-(-len(sums) // 2), len(sums) // 2])
        sums = lower + torch.nn.functional.pad(upper, (0, len(lower) - len(upper)))
    mean = (sums / torch.full_like(sums, max(n, 1))).to(torch.float32)
    mean = mean.masked_fill(mean < _SMALLEST, 0.0)
    return mean.masked_fill(~mean.isfinite(), torch.nan)


def _parts(payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the magnitude, float32 [1], and the signs, float32 [n] of 1 and -1."""
    # a copy, since slices of larger messages may start at odd addresses
    magnitude = payload[:MAGNITUDE_BYTES].clone().view(torch.float32)
    bits, full = payload[MAGNITUDE_BYTES:], n // _BLOCK * _BLOCK
    blocks = [
        unpack(bits[: full // 8].view(-1, _BLOCK // 8), 1, _BLOCK),
        unpack(bits[full // 8 :].view(1, -1), 1, n - full),
    ]
    codes = torch.cat([rows.flatten() for rows in blocks])
    return magnitude, 1.0 - 2.0 * codes


def _run_encode(x: Tensor, residual: Tensor | None, kept: Tensor | None, payload: Tensor) -> None:
    check_floats(x=x, residual=residual, kept=kept)
    check_payload(payload, payload_bytes(x.numel()), x)
    if not native.compiled(x):
        triton = native.triton_kernels(x)
        (triton.sign.encode if triton else encode_reference)(x, residual, kept, payload)
        return
    n, source, target = x.numel(), x.data_ptr(), payload.data_ptr()
    before, after = address(residual), address(kept)
    block_sums = torch.empty(_blocks(n), dtype=torch.float64)
    sums = block_sums.data_ptr()
    for_ranges(n, _BLOCK, lambda a, b: _c_encode(source, before, n, a, b, sums, target))
    _c_magnitude(sums, n, target)
    if after is not None:
        for_ranges(n, _BLOCK, lambda a, b: _c_keep(source, before, after, a, b, target))


def _run_decode(payloads: list[Tensor], out: Tensor, alpha: float, add: bool) -> None:
    check_floats(out=out)
    for payload in payloads:
        check_payload(payload, payload_bytes(out.numel()), out)
    if not native.compiled(out):
        triton = native.triton_kernels(out)
        (triton.sign.decode if triton else decode_reference)(payloads, out, alpha, add)
        return
    n, count, target = out.numel(), len(payloads), out.data_ptr()
    sources = addresses(payloads)
    for_ranges(n, _BLOCK, lambda a, b: _c_decode(sources, count, a, b, alpha, add, target))


_encode = register(
    "sign_encode(Tensor x, Tensor? residual, Tensor(a!)? kept, Tensor(b!) payload) -> ()",
    _run_encode,
)
_decode = register(
    "sign_decode(Tensor[] payloads, Tensor(a!) out, float alpha, bool add) -> ()", _run_decode
)
