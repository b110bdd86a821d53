"""Checksum of a message on a device, in its header: the host would wait for a number.

Of sums of the 64-bit words (modulo 2^64), one plain and one weighted by place: words lie in R rows
of 32, of which row r weighs R - r. Any flipped bit changes the plain sum; rows that change places
change the weighted one. The finalizer of MurmurHash3 (Appleby 2011, fmix64) mixes the plain sum,
and takes in the weighted one after its first product: not before, since a high bit of a word
changes the same bit of both sums, so that the two changes would cancel. The checksum is the lower
half of the result.
"""

import torch
from torch import Tensor

from shardlab.codecs.native import operator as register

_ROW = 32
"""64-bit words that share a weight"""
_FACTORS = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
"""of the finalizer, as signed numbers"""


def write_header(words: Tensor, identity: int, header: Tensor) -> None:
    """Write the header that belongs to a payload.

    Args:
        words: int64 [n], of the payload and its padding.
        identity: the lower half of the header, 32 bits.
        header: int64 [1]; its upper half becomes the checksum.
    """
    _WRITE(words, identity, header)


def write_header_reference(words: Tensor, identity: int, header: Tensor) -> None:
    """Run the operator `write_header` in PyTorch."""
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    if whole < words.numel():
        rows = torch.cat([rows, words[whole:].sum().view(1)])
    weights = torch.arange(len(rows), 0, -1, device=words.device)
    mixed = _upper_half_into_lower(rows.sum().view(1)) * _FACTORS[0]
    mixed = mixed + (rows * weights).sum()
    mixed = _upper_half_into_lower(mixed) * _FACTORS[1]
    header.copy_(_upper_half_into_lower(mixed) << 32 | identity)


def _upper_half_into_lower(word: Tensor) -> Tensor:
    """Return `word` xor its upper 31 bits, which loses nothing."""
    return word ^ word >> 33 & 0x7FFFFFFF


_WRITE = register(
    "write_header(Tensor words, int identity, Tensor(a!) header) -> ()", write_header_reference
)
