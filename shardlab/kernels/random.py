"""Counter-based random numbers: functions of message and element.

32 bits of element i of the message with key words (k0, k1), all arithmetic modulo 2**32:

    x = i * 0x9E3779B9 + k0
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ k1) * 0x735A2D97
    x = x ^ (x >> 15)

A Weyl sequence through the two-multiplication mixer of Ettinger's hash-prospector. k1 enters
between the multiplications, so that streams with different keys are not shifts of each other.
There is no state: any number of threads, ranks or devices draws the same numbers.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def random_bits(n: int, k0: int, k1: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 bits for each of the elements 0 to n - 1, as int64 [n] in [0, 2**32)."""
    return bits_of(torch.arange(n, dtype=torch.int64, device=device), k0, k1)


def bits_of(elements: Tensor, k0: int, k1: int | Tensor) -> Tensor:
    """Return 32 bits for each of the elements, int64, as int64 of the same shape.

    Args:
        k1: Key word, or one per element.
    """
    x = (_times(elements & _MASK, 0x9E3779B9) + k0) & _MASK
    x = _times(x ^ (x >> 16), 0x21F0AAAD)
    x = _times(x ^ (x >> 15) ^ k1, 0x735A2D97)
    return x ^ (x >> 15)


def uniform(n: int, k0: int, k1: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [n] in [0, 1): the upper 24 bits, times 2**-24."""
    return (random_bits(n, k0, k1, device) >> 8).to(torch.float32) * 2.0**-24


def _times(x: Tensor, factor: int) -> Tensor:
    """Return x * factor modulo 2**32, for x in [0, 2**32): halves, since 64 bits would overflow."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & _MASK
