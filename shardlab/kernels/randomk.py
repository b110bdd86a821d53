"""k different places among n elements, drawn from a key: the same on all devices and threads.

[0, n) is cut into k parts, part j from floor(j n / k) to floor((j + 1) n / k). One place is drawn
in each, and all of them are turned by the same random amount, modulo n:

    size_j = floor((j + 1) n / k) - floor(j n / k)
    place_j = (floor(j n / k) + floor(bits_j * size_j / 2**32) + floor(bits_k * n / 2**32)) mod n

where bits_i are the 32 bits of element i under the key (`shardlab.kernels.random`). The turn makes
every element as likely as any other, k/n, whatever the sizes of the parts (up to n * 2**-32, since
32 bits fill no n exactly). Without it an element of a shorter part would be likelier.
"""

import ctypes

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.native import INT, POINTER, function
from shardlab.kernels.operators import register
from shardlab.kernels.parallel import for_ranges
from shardlab.kernels.random import random_bits

_c_places = function(
    "randomk_places", INT, INT, ctypes.c_uint32, ctypes.c_uint32, INT, INT, POINTER
)


def random_places(n: int, k: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """int32 [k], ascending, all different and below n < 2**31.

    Args:
        key: words of a key that all ranks share.
    """
    places = torch.empty(k, dtype=torch.int32, device=device)
    _places(n, *key, places)
    falls = torch.nonzero(places[1:] < places[:-1]).flatten()
    if falls.numel():
        # the turn took the last ones over the end
        first = int(falls) + 1
        places = torch.cat([places[first:], places[:first]])
    return places


def places_reference(n: int, k0: int, k1: int, places: Tensor) -> None:
    """The operator `randomk_places` in PyTorch."""
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
        places_reference(n, k0, k1, places)
        return
    target = places.data_ptr()

    def part(start: int, stop: int) -> None:
        _c_places(n, k, k0, k1, start, stop, target)

    for_ranges(k, 1, part)


_places = register("randomk_places(int n, int k0, int k1, Tensor(a!) places) -> ()", _run)
