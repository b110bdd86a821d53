"""Every compiled kernel, and a digest of what all of them compute.

`python tests/kernels/all_kernels.py LIBRARY` prints the digest with another build of csrc/.
"""

import hashlib
import sys
from pathlib import Path

import torch
from kernel_vectors import any_bits, bits

from shardlab.kernels import casts, int8, native, sketch
from shardlab.kernels.checksum import checksum

GROUPED = {kernel.format.name: kernel for kernel in (int8.KERNEL, casts.BF16)}
KEY = (0x12345678, 0x9ABCDEF0)


def digest() -> str:
    """Of payloads, residuals, sums and checksums for many sizes of random bits."""
    result = hashlib.sha256()
    for kernel in GROUPED.values():
        for seed, n in enumerate([1, 7, 129, 5000]):
            x, residual, kept = any_bits(n, seed), torch.linspace(-1, 1, n), torch.empty(n)
            payload = kernel.encode_residual(x, residual, kept, 128, KEY)
            kernel.decode_sum([payload, payload], 128, residual, 1 / 3)
            result.update(repr((payload.tolist(), bits(kept), bits(residual))).encode())
    for n in (8, 8000):
        result.update(repr(checksum(any_bits(n, n).view(torch.uint8))).encode())
    _add_sketches(result)
    return result.hexdigest()


def _add_sketches(result: "hashlib._Hash") -> None:
    keys = [KEY, KEY[::-1], (1, 2)]
    for seed, n in enumerate([1, 255, 5000]):
        table = torch.zeros(3, 100)
        sketch.add(any_bits(n, seed), keys, table)
        estimates = sketch.estimate(table, keys, n)
        result.update(repr((bits(table), bits(estimates))).encode())


if __name__ == "__main__":
    native.LIBRARY = Path(sys.argv[1])
    print(digest())
