"""Counter-based random numbers and positions: functions of (message, element) alone.

32 bits of element i of the message with key words (k0, k1), all arithmetic modulo 2**32:

    x = i * 0x9E3779B9 + k0
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ k1) * 0x735A2D97
    x = x ^ (x >> 15)

A Weyl sequence through the two-multiplication mixer of Ettinger's hash-prospector; k1 enters
between the multiplications, so that streams with different keys are not shifts of each other. No
state: any number of threads, ranks or devices draws the same numbers.

For k random positions [0, n) is cut into k parts, part j from floor(j n / k) to
floor((j + 1) n / k). One position is drawn in each, and all are shifted by one random amount,
modulo n:

    size_j = floor((j + 1) n / k) - floor(j n / k)
    position_j = (floor(j n / k) + floor(bits_j * size_j / 2**32) + floor(bits_k * n / 2**32)) mod n

where bits_i are the 32 bits of element i under the key. The shift makes every element as likely as
any other, k/n, whatever the sizes of the parts (up to n * 2**-32, since 32 bits fill no n exactly).
Without it an element of a shorter part would be likelier.
"""

import ctypes

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.native import INT, POINTER, function
from shardlab.codecs.kernels.operators import register
from shardlab.codecs.kernels.parallel import for_ranges
from shardlab.core.device import accelerator_of

_MASK = 0xFFFFFFFF

_c_places = function(
    "randomk_places", INT, INT, ctypes.c_uint32, ctypes.c_uint32, INT, INT, POINTER
)


def random_bits(n: int, k0: int, k1: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 bits for each of the elements 0 to n - 1, as int64 [n] in [0, 2**32)."""
    return bits_of(torch.arange(n, dtype=torch.int64, device=device), k0, k1)


def bits_of(elements: Tensor, k0: int, k1: int | Tensor) -> Tensor:
    """Return 32 bits for each of the given elements (int64), as int64 of the same shape.

    Args:
        k1: or one for each element.
    """
    x = (_times(elements & _MASK, 0x9E3779B9) + k0) & _MASK
    x = _times(x ^ (x >> 16), 0x21F0AAAD)
    x = _times(x ^ (x >> 15) ^ k1, 0x735A2D97)
    return x ^ (x >> 15)


def uniform(n: int, k0: int, k1: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [n] in [0, 1): the upper 24 of the bits, times 2**-24."""
    return (random_bits(n, k0, k1, device) >> 8).to(torch.float32) * 2.0**-24


def random_places(n: int, k: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """Return k different positions below n < 2**31: int32 [k], ascending.

    Args:
        key: words of a key that all ranks share.
    """
    places = torch.empty(k, dtype=torch.int32, device=device)
    _places(n, *key, places)
    if accelerator_of(device) is not None:
        return places.sort().values  # the host would wait for the place of the fall
    falls = torch.nonzero(places[1:] < places[:-1]).flatten()
    if falls.numel():
        # the shift moved the last ones past the end
        first = int(falls) + 1
        places = torch.cat([places[first:], places[:first]])
    return places


def places_reference(n: int, k0: int, k1: int, places: Tensor) -> None:
    """Run the operator `randomk_places` in PyTorch."""
    k = places.numel()
    part = torch.arange(k + 1, dtype=torch.int64, device=places.device) * n // k
    bits = random_bits(k + 1, k0, k1, places.device)
    drawn = part[:-1] + (bits[:-1] * part.diff() >> 32)
    places.copy_((drawn + (bits[-1] * n >> 32)) % n)


def _run(n: int, k0: int, k1: int, places: Tensor) -> None:
    k = places.numel()
    if not 0 <= k <= n < 2**31 or places.dtype != torch.int32 or not places.is_contiguous():
        raise ValueError(f"cannot draw {k} {places.dtype} places among {n} elements")
    if k == 0:
        return
    if not native.compiled(places):
        triton = native.triton_kernels(places)
        (triton.random.draw if triton else places_reference)(n, k0, k1, places)
        return
    target = places.data_ptr()

    def part(start: int, stop: int) -> None:
        _c_places(n, k, k0, k1, start, stop, target)

    for_ranges(k, 1, part)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return x * factor modulo 2**32, for x in [0, 2**32): halves, since 64 bits would overflow."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & _MASK


_places = register("randomk_places(int n, int k0, int k1, Tensor(a!) places) -> ()", _run)
