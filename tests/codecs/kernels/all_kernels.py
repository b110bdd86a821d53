"""Every compiled kernel, and a digest of the results of all of them.

`python -m tests.codecs.kernels.all_kernels LIBRARY...` prints the digest with each of these builds of
csrc/.
"""

import hashlib
import itertools
import os
import sys
from pathlib import Path

import torch

from shardlab.codecs.kernels import (
    build,
    float8,
    floats,
    indices,
    integers,
    scatter,
    select,
    sign,
    signs,
    sketch,
)
from shardlab.codecs.kernels.adam import sum_of_squares
from shardlab.codecs.kernels.random import random_places
from tests.codecs.kernels.adam_cases import BF16, FP16, FP32, Case, stepped
from tests.codecs.kernels.kernel_vectors import any_bits, bits

SIGNS = signs.KERNELS
GROUPED = {**integers.KERNELS, **floats.KERNELS, **float8.KERNELS, **SIGNS}
KEY = (0x12345678, 0x9ABCDEF0)


def digest() -> str:
    """Hash the results of all kernels for random bits and for normal numbers."""
    result = hashlib.sha256()
    for n, wild in itertools.product([1, 7, 129, 1300], [True, False]):
        generator = torch.Generator().manual_seed(n)
        x = any_bits(n, n) if wild else torch.randn(n, generator=generator)
        for kernel in GROUPED.values():
            residual, kept = torch.linspace(-1, 1, n), torch.empty(n)
            payload = kernel.encode_residual(x, residual, kept, 128, KEY)
            kernel.decode_sum([payload, payload], 128, residual, 1 / 3)
            result.update(repr((payload.tolist(), bits(kept), bits(residual))).encode())
        result.update(repr(votes(x)).encode())
    for n in (7, 5000, 70_001):
        result.update(repr(sparse(n)).encode())
    for n in (1, 255, 5000):
        result.update(repr(sketches(n)).encode())
    for n, wild in itertools.product([1, 129, 1300], [True, False]):
        result.update(repr(steps_of_adam(n, wild)).encode())
    return result.hexdigest()


def votes(x: torch.Tensor) -> tuple[object, ...]:
    """Return the results of the kernels of majority votes."""
    residual, kept = torch.linspace(-1, 1, len(x)), torch.empty(len(x))
    payloads = [sign.encode_residual(x, residual, kept), *(sign.encode(x.roll(i)) for i in (1, 2))]
    sign.decode_votes(payloads, residual, 1 / 3)
    return payloads[0].tolist(), bits(kept), bits(residual)


def sparse(n: int) -> tuple[object, ...]:
    """Return the results of the kernels of sparse vectors for random bits."""
    x, residual, kept = any_bits(n, n), torch.linspace(-1, 1, n), torch.empty(n)
    values, places = select.largest(x, n // 7, 0, residual, kept)
    select.keep(None, residual, kept, places, values, values / 3)
    coded = []
    for coding in ("bitmap", "elias_fano"):
        size = indices.Split.of(n, n // 7, coding).size
        coded.append(torch.zeros(size, dtype=torch.uint8))
        indices.encode(places, n, coding, coded[-1])
        (places,) = indices.decode(coded[-1:], n, [n // 7], coding)
    drawn = random_places(n, n // 7, KEY, x.device)
    scatter.scatter_sum([values, values], [places, drawn], residual, 1 / 3)
    return bits(values), bits(kept), bits(residual), [each.tolist() for each in coded]


def sketches(n: int) -> tuple[object, ...]:
    """Return the results of the kernels of count sketches for random bits."""
    keys, table = [KEY, KEY[::-1], (1, 2)], torch.zeros(3, 100)
    sketch.add(any_bits(n, n), keys, table)
    return bits(table), bits(sketch.estimate(table, keys, n))


def steps_of_adam(n: int, wild: bool) -> list[object]:
    """Return the results of the kernels of Adam."""
    dtypes = itertools.product([FP32, BF16, FP16], [FP32, BF16], [FP32, BF16], [FP32, BF16, FP16])
    cases = [
        Case(n, wild=wild, dtypes=each, ranks=ranks, mirror=mirror)
        for each, (ranks, mirror) in itertools.product(dtypes, [(1, None), (2, BF16), (1, FP16)])
    ]
    return [
        *(stepped(case) for case in cases),
        sum_of_squares([any_bits(n, n).nan_to_num().clamp(-1e9, 1e9)] * 2, 1 / 3, 7),
    ]


if __name__ == "__main__":
    build.SOURCES = Path("absent")
    for library in sys.argv[1:]:
        child = os.fork()  # a process stays with the library that it has loaded first
        if not child:
            build.LIBRARY = Path(library)
            print(digest())
            break
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
