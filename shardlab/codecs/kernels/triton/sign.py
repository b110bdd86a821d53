"""The kernels of shardlab/codecs/kernels/sign.py in Triton: same payloads and votes, bit for bit."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton import signs
from shardlab.codecs.kernels.triton.grouped import TritonFormat, codes_at
from shardlab.codecs.kernels.triton.launch import BLOCK, addresses, spans
from shardlab.codecs.kernels.triton.numbers import float_of

_GROUP = 512
_SUMS = TritonFormat(4, 1, signs.sum_head, signs.sign_code, signs.efsign_value)
"""bits of the elements, and sums of the magnitudes of 512 as heads; nothing decodes them"""


# of one block, a number would be a constant, and no variable of a loop
@triton.jit(do_not_specialize=["count"])
def _mean_kernel(sums, folds, payload, count, n, BLOCK: tl.constexpr):
    """Write the mean: in one program, since it folds all sums. BLOCK is no less than threads."""
    number = tl.arange(0, BLOCK)
    half = (count + 1) // 2
    for begin in range(0, half, BLOCK):
        place = begin + number
        low = tl.load(sums + place, mask=place < half, other=0.0).to(tl.float64)
        place += half
        high = tl.load(sums + place, mask=place < count, other=0.0).to(tl.float64)
        tl.store(folds + begin + number, low + high, mask=begin + number < half)
    size = half
    while size > 1:
        # what other threads have stored is loaded
        tl.debug_barrier()
        half = (size + 1) // 2
        for begin in range(0, half, BLOCK):
            place = begin + number
            low = tl.load(folds + place, mask=place < half, other=0.0)
            high = tl.load(folds + half + place, mask=half + place < size, other=0.0)
            tl.store(folds + place, low + high, mask=place < half)
        size = half
    tl.debug_barrier()
    mean = (tl.load(folds) / (tl.full([], 1.0, tl.float64) * n)).to(tl.float32)
    bits = tl.where(mean < 1.1754943508222875e-38, 0, mean.to(tl.int32, bitcast=True))
    bits = tl.where(tl.abs(mean) < float("inf"), bits, 0x7FC00000)
    tl.store(payload.to(tl.pointer_type(tl.int32)), bits)


@triton.jit
def _keep_kernel(x, residual, kept, payload, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(residual + place, mask=place < n, other=0.0)
    given = tl.load(x + place, mask=place < n, other=0.0) + before
    mean = float_of(tl.load(payload.to(tl.pointer_type(tl.int32))))
    rest = given - tl.where(given < 0.0, 0.0 - mean, mean)
    finite = tl.abs(rest) < float("inf")
    tl.store(kept + place, tl.where(finite, rest, before), mask=place < n)


@triton.jit
def _vote_kernel(
    payloads,
    out,
    alpha,
    count,
    groups,
    group,
    first_group,
    first_element,
    first_byte,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    width = (group + 7) // 8
    position = plane * width + column
    inside = (row < groups) & (column < width) & (position < group)
    total = tl.zeros([1, 1, 1], tl.float32)
    votes = tl.zeros([ROWS, PLANES, WIDTH], tl.int32)
    for index in range(count):
        payload = tl.load(payloads + index).to(tl.pointer_type(tl.uint8))
        mean = float_of(tl.load(payload.to(tl.pointer_type(tl.int32))))
        code = codes_at(payload + 4 + first_byte, row, plane, position, inside, group, 1)
        total += mean
        votes += tl.where(mean == 0.0, 0, 1 - 2 * code)
    # no negative zero where all means are 0
    value = ((votes > 0).to(tl.float32) - (votes < 0).to(tl.float32)) * (total * alpha + 0.0)
    element = first_element + row * group + position
    if ADD:
        value = tl.load(out + element, mask=inside, other=0.0) + value
    tl.store(out + element, value, mask=inside)


def encode(x: Tensor, residual: Tensor | None, kept: Tensor | None, payload: Tensor) -> None:
    """Run the operator `sign_encode` on the GPU; 1/64 byte per element is temporary."""
    n, blocks = x.numel(), triton.cdiv(x.numel(), _GROUP)
    if not n:
        payload.zero_()
        return
    sums = torch.empty(blocks, device=x.device)
    folds = torch.empty(triton.cdiv(blocks, 2), dtype=torch.float64, device=x.device)
    _SUMS.write(x, residual, None, _GROUP, (0, 0), sums, payload[4:])
    _mean_kernel[(1,)](sums, folds, payload, blocks, n, BLOCK=BLOCK)
    if residual is not None and kept is not None:
        _keep_kernel[(triton.cdiv(n, BLOCK),)](
            x, residual, kept, payload, n, BLOCK=BLOCK, enable_fp_fusion=False
        )


def decode(payloads: Sequence[Tensor], out: Tensor, alpha: float, add: bool) -> None:
    """Run the operator `sign_decode` on the GPU."""
    for span in spans(out.numel(), _GROUP, 1):
        _vote_kernel[span.grid](
            addresses(payloads),
            out,
            alpha,
            len(payloads),
            *span.where(),
            ADD=add,
            **span.tile(),
            enable_fp_fusion=False,
        )
