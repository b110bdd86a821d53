"""Every compiled kernel, and a digest of what all of them compute.

`python tests/kernels/all_kernels.py LIBRARY` prints the digest with another build of csrc/.
"""

import hashlib
import sys
from pathlib import Path

import torch
from kernel_vectors import any_bits, bits

from shardlab.kernels import casts, dynamic8, fp8, int8, native, natural
from shardlab.kernels import casts, int4, int8, native, qsgd

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
    )
}
KEY = (0x12345678, 0x9ABCDEF0)


def digest() -> str:
    """Of payloads, residuals and sums for many sizes of random bits."""
    result = hashlib.sha256()
    for kernel in GROUPED.values():
        for seed, n in enumerate([1, 7, 129, 5000]):
            x, residual, kept = any_bits(n, seed), torch.linspace(-1, 1, n), torch.empty(n)
            payload = kernel.encode_residual(x, residual, kept, 128, KEY)
            kernel.decode_sum([payload, payload], 128, residual, 1 / 3)
            result.update(repr((payload.tolist(), bits(kept), bits(residual))).encode())
    return result.hexdigest()


if __name__ == "__main__":
    native.LIBRARY = Path(sys.argv[1])
    print(digest())
