"""The estimates of shardlab/codecs/kernels/sketch.py in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import signed
from shardlab.codecs.kernels.triton.numbers import bits_of, float_of, random_bits
from shardlab.core.device import accelerator_of

_TILE = 2048
"""buckets that a program reads"""


@triton.jit
def _estimate_kernel(
    table,
    words,
    estimates,
    n,
    buckets,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WIDTH is a power of two, no less than ROWS; rows beyond are greater than any number."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, WIDTH)[None, :]
    k0 = tl.load(words + 2 * row, mask=row < ROWS, other=0)
    k1 = tl.load(words + 2 * row + 1, mask=row < ROWS, other=0)
    drawn = random_bits(element.to(tl.uint32)[:, None], k0, k1)
    bucket = ((drawn >> 1).to(tl.int64) * buckets) >> 31
    inside = (element < n)[:, None] & (row < ROWS)
    value = tl.load(table + row.to(tl.int64) * buckets + bucket, mask=inside, other=0.0)
    value = tl.where((drawn & 1) == 1, 0.0 - value, value)
    # as integers in the order of the numbers, NaN last as in torch
    bits = tl.where(value == value, bits_of(value), 0x7FC00000)
    order = tl.where(row < ROWS, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    order = tl.sort(order)
    lower = tl.sum(tl.where(row == (ROWS - 1) // 2, order, 0), axis=1)
    upper = tl.sum(tl.where(row == ROWS // 2, order, 0), axis=1)
    lower = float_of(lower ^ ((lower >> 31) & 0x7FFFFFFF))
    upper = float_of(upper ^ ((upper >> 31) & 0x7FFFFFFF))
    tl.store(estimates + element, 0.5 * lower + 0.5 * upper + 0.0, mask=element < n)


def estimate(table: Tensor, keys: list[int], estimates: Tensor) -> None:
    """Run the operator `sketch_estimate` on the GPU, without temporaries."""
    n, (rows, buckets) = estimates.numel(), table.shape
    width = max(2, triton.next_power_of_2(rows))
    block = _TILE // width
    _estimate_kernel[(triton.cdiv(n, block),)](
        table,
        _on_device([signed(word) for word in keys], table.device),
        estimates,
        n,
        buckets,
        ROWS=rows,
        WIDTH=width,
        BLOCK=block,
        enable_fp_fusion=False,
    )


def _on_device(words: list[int], device: torch.device) -> Tensor:
    """Return the words of keys, which are new in every step, without a wait for the device."""
    given = torch.tensor(words, dtype=torch.int32)
    if (accelerator := accelerator_of(device)) is None:
        return given
    host = accelerator.page_locked(given.shape, given.dtype).copy_(given)
    on_device = torch.empty_like(given, device=device)
    accelerator.copy(on_device, host)
    return on_device
