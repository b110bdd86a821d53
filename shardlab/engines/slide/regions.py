"""Memory in named regions, that mappings of several processes show."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Regions:
    """Tensors in a mapping, by the names of its regions.

    Args:
        places: bytes of the mapping.
    """

    def __init__(self, mapped: mmap.mmap, places: Mapping[str, range]) -> None:
        self._mapped, self._places = mapped, places

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The region, as far as the shape needs it: a view, which keeps the mapping."""
        place, count = self._places[name], torch.Size(shape).numel()
        assert count * dtype.itemsize <= len(place), f"{name}: {len(place)} bytes"
        if not count:
            return torch.empty(*shape, dtype=dtype)
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=place.start)
        return flat.view(*shape)


def places_of(
    sizes: Mapping[str, int], whole: Callable[[int], int], first: int = 0
) -> dict[str, range]:
    """Where regions of so many bytes are, one after another.

    Args:
        whole: what a region takes, with what is left empty behind it.
        first: where they begin.
    """
    starts = accumulate(map(whole, sizes.values()), initial=first)
    return {
        name: range(start, start + size)
        for (name, size), start in zip(sizes.items(), starts, strict=False)
    }
