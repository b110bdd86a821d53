"""Common parts of launches of Triton kernels: programs of a message, addresses, words of keys."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

BLOCK = 1024
"""elements of a program, where these are no groups"""
_TILE = 2048
"""elements of a program: enough to keep a multiprocessor busy, few enough for its registers"""


def signed(word: int) -> int:
    """Return 32 bits as a signed number, so that all keys have one type in a kernel."""
    return word - (word >> 31 << 32)


def addresses(vectors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of vectors on their device."""
    return _table(tuple(each.data_ptr() for each in vectors), vectors[0].device)


@lru_cache(4096)
def _table(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table on the device; buffers are reused, so a step copies what it did not before."""
    return torch.tensor(pointers, device=device)


class Span(NamedTuple):
    """Groups of equal length in a message: all full ones, or the shorter last one."""

    groups: int
    group: int
    first_group: int
    first_element: int
    bits: int

    @property
    def rows(self) -> int:
        """Return the groups of a program."""
        return max(1, _TILE // triton.next_power_of_2(self.group))

    @property
    def grid(self) -> tuple[int]:
        """Return the number of programs."""
        return (triton.cdiv(self.groups, self.rows),)

    def where(self) -> tuple[int, ...]:
        """Return groups, group, first_group, first_element and the offset of their codes."""
        return *self[:4], self.first_element * self.bits // 8

    def tile(self) -> dict[str, int]:
        """Return the sizes of a program's tile, powers of two."""
        planes = 8 // (self.bits % 8) if self.bits % 8 else 1
        width = triton.next_power_of_2(triton.cdiv(self.group, planes))
        return {"ROWS": self.rows, "PLANES": planes, "WIDTH": width}


def spans(n: int, group: int, bits: int) -> list[Span]:
    """Return the spans of a message of n elements."""
    full, rest = divmod(n, group)
    found = [Span(full, group, 0, 0, bits), Span(1, rest, full, full * group, bits)]
    return [span for span in found if span.groups and span.group]
