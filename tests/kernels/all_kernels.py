"""Every compiled kernel, and a digest of what all of them compute.

`python tests/kernels/all_kernels.py LIBRARY` prints the digest with another build of csrc/.
"""

import hashlib
import itertools
import sys
from pathlib import Path

import torch
from kernel_vectors import any_bits, bits

from shardlab.kernels import casts, dynamic8, fp8, int8, native, natural
from shardlab.kernels import casts, int4, int8, native, qsgd
from shardlab.kernels import casts, efsign, int8, native, onebit, sign

GROUPED = {
    kernel.format.name: kernel
    for kernel in (
        int8.KERNEL,
        casts.BF16,
        casts.FP16,
        fp8.KERNELS["e4m3"],
        fp8.KERNELS["e5m2"],
        dynamic8.KERNEL,
        natural.KERNEL,
        int8.STOCHASTIC,
        int4.NEAREST,
        int4.STOCHASTIC,
        int4.NORMAL_FLOAT,
        *qsgd.KERNELS.values(),
        casts.BF16,
        efsign.KERNEL,
        onebit.KERNEL,
    )
}
KEY = (0x12345678, 0x9ABCDEF0)


def digest() -> str:
    """Of payloads, residuals and sums for many sizes of random bits and of normal numbers."""
    result = hashlib.sha256()
    for n, wild in itertools.product([1, 7, 129, 5000], [True, False]):
        generator = torch.Generator().manual_seed(n)
        x = any_bits(n, n) if wild else torch.randn(n, generator=generator)
        for kernel in GROUPED.values():
            residual, kept = torch.linspace(-1, 1, n), torch.empty(n)
            payload = kernel.encode_residual(x, residual, kept, 128, KEY)
            kernel.decode_sum([payload, payload], 128, residual, 1 / 3)
            result.update(repr((payload.tolist(), bits(kept), bits(residual))).encode())
        residual, kept = torch.linspace(-1, 1, n), torch.empty(n)
        votes = [sign.encode_residual(x, residual, kept), *(sign.encode(x.roll(i)) for i in (1, 2))]
        sign.decode_votes(votes, residual, 1 / 3)
        result.update(repr((votes[0].tolist(), bits(kept), bits(residual))).encode())
    return result.hexdigest()


if __name__ == "__main__":
    native.LIBRARY = Path(sys.argv[1])
    print(digest())
