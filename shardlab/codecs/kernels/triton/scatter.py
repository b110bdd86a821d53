"""The kernel of shardlab/codecs/kernels/scatter.py in Triton."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import BLOCK


# k differs by message: Triton would compile while training
@triton.jit(do_not_specialize=["k"])
def _add_kernel(values, places, out, alpha, k, BLOCK: tl.constexpr):
    """Add alpha * values; all places are different, so no addition is atomic."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + number, mask=number < k, other=0)
    value = tl.load(values + number, mask=number < k, other=0.0)
    before = tl.load(out + place, mask=number < k, other=0.0)
    tl.store(out + place, before + value * alpha, mask=number < k)


def add(values: Tensor, places: Tensor, out: Tensor, alpha: float) -> None:
    """Run the operator `scatter_add` on the GPU."""
    k = values.numel()
    _add_kernel[(triton.cdiv(k, BLOCK),)](
        values, places, out, alpha, k, BLOCK=BLOCK, enable_fp_fusion=False
    )


def add_all(values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float) -> None:
    """Run the operator `scatter_sum` on the GPU."""
    out.zero_()
    for each, place in zip(values, places, strict=True):
        add(each, place, out, 1.0)
    out.mul_(alpha)
