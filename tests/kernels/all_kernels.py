"""Every compiled kernel, and a digest of what all of them compute.

`python tests/kernels/all_kernels.py LIBRARY` prints the digest with another build of csrc/.
"""

import hashlib
import sys
from pathlib import Path

import torch
from kernel_vectors import any_bits, bits

from shardlab.kernels import casts, indices, int8, native, scatter, select
from shardlab.kernels.randomk import random_places

GROUPED = {kernel.format.name: kernel for kernel in (int8.KERNEL, casts.BF16)}
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
    for n in (7, 5000, 70_001):
        result.update(repr(sparse(n)).encode())
    return result.hexdigest()


def sparse(n: int) -> tuple[object, ...]:
    """What the kernels of sparse vectors compute from random bits."""
    x, residual, kept = any_bits(n, n), torch.linspace(-1, 1, n), torch.empty(n)
    values, places = select.largest(x, n // 7, 0, residual, kept)
    select.keep(None, residual, kept, places, values, values / 3)
    coded = []
    for coding in ("bitmap", "varint"):
        room = torch.zeros(indices.most_bytes(n, n // 7, coding), dtype=torch.uint8)
        coded.append(room[: indices.encode(places, n, coding, room)])
        (places,) = indices.decode(coded[-1:], n, [n // 7], coding)
    drawn = random_places(n, n // 7, KEY, x.device)
    scatter.scatter_sum([values, values], [places, drawn], residual, 1 / 3)
    return bits(values), bits(kept), bits(residual), [each.tolist() for each in coded]


if __name__ == "__main__":
    native.LIBRARY = Path(sys.argv[1])
    print(digest())
