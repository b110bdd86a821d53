"""Parameters that slide together: in main memory all the time, on the device for their use."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.layout import REPLICAS
from shardlab.engines.flat import named_parts
from shardlab.engines.slide.moments import KINDS
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.node_file import NodeFile

_FLOAT = torch.float32.itemsize


class Precision(NamedTuple):
    """The types of one unit's vectors beside float32 parameters."""

    computed: torch.dtype
    """of the parameters on the device"""
    landed: torch.dtype
    """of gradients that arrive in main memory"""
    kept: torch.dtype
    """of gradients that stay there"""
    moments: torch.dtype


class SlidUnit:
    """Some parameters as one vector, of which every rank of a node updates 1/W.

    The parameters lie one after another, then zeros up to W equal chunks. Main memory, which the
    ranks share, holds this vector in float32, a mirror of it in the type that computes where that
    is narrower, and gradients that stay until they are applied. `map` gives the unit that memory,
    `map_moments` that of its moments.

    Outside of its use a parameter has no memory on the device: every element of it is NaN, so that
    whoever uses it then finds out.

    Args:
        index: in the order of use; the root comes first.
        parameters: by name; with their shapes, but not yet their values.
        rank, world_size: among the ranks of the node.
        slots: vectors of gradients that stay: one for each rank, one of which each rank has its
            chunk, or none.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        precision: Precision,
        slots: int,
    ) -> None:
        self.index, self.name = index, name
        self.parameters = dict(parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.count = sum(shape.numel() for shape in self.shapes.values())
        """elements, without the zeros at the end"""
        self.chunk = -(-self.count // world_size)
        self.size = world_size * self.chunk
        self.own = slice(rank * self.chunk, (rank + 1) * self.chunk)
        """what this rank updates"""
        self.first = rank * self.chunk
        self.precision = precision
        self.message = Unit(name, (Block(name, self.count, 1),))
        self.between_nodes = Unit(name + REPLICAS, (Block(name, self.chunk, 1),))
        self.step = torch.zeros(())
        """updates so far"""
        self.updates = 0
        """that this process has begun"""
        self._rank, self._slots = rank, slots
        self._places: dict[int, list[Tensor]] = {}
        """the parameters in vectors on the device, by their addresses"""
        self._nothing: list[Tensor] = []
        """what they are without memory"""
        self.vectors: dict[str, Tensor] = {}
        """whole: `parameter`, `exp_avg`, `exp_avg_sq`, perhaps `mirror`"""
        self.slots: list[Tensor] = []

    @property
    def narrow(self) -> bool:
        """Whether the device computes with a mirror."""
        return self.precision.computed is not torch.float32

    def layout(self) -> dict[str, int]:
        """Bytes of the regions of main memory, without moments."""
        kinds = {"parameter": self.size * _FLOAT}
        if self.narrow:
            kinds["mirror"] = self.size * self.precision.computed.itemsize
        for slot in range(self._slots):
            kinds[f"gradient{slot}"] = self.size * self.precision.kept.itemsize
        return {self.region(kind): size for kind, size in kinds.items()}

    def moments_layout(self) -> dict[str, int]:
        """Bytes of the regions of moments."""
        size = self.size * self.precision.moments.itemsize
        return {self.region(kind): size for kind in KINDS}

    def map(self, memory: NodeMemory) -> None:
        """Takes its regions."""
        dtypes = {"parameter": torch.float32}
        if self.narrow:
            dtypes["mirror"] = self.precision.computed
        self.vectors = {
            kind: memory.tensor(self.region(kind), dtype, (self.size,))
            for kind, dtype in dtypes.items()
        }
        self.slots = [
            memory.tensor(self.region(f"gradient{slot}"), self.precision.kept, (self.size,))
            for slot in range(self._slots)
        ]

    def map_moments(self, where: NodeMemory | NodeFile) -> None:
        """Takes their regions."""
        for kind in KINDS:
            dtype = self.precision.moments
            self.vectors[kind] = where.tensor(self.region(kind), dtype, (self.size,))

    def store(self) -> None:
        """This rank's chunk takes the values of the parameters, the same on all ranks."""
        whole = torch.zeros(self.size)
        for parameter, view in zip(self.parameters.values(), self._views(whole), strict=True):
            view.copy_(parameter.data)
        self.vectors["parameter"][self.own].copy_(whole[self.own])

    @torch.no_grad()
    def refresh(self) -> None:
        """The mirror of this rank's chunk follows parameters that somebody has written to."""
        if self.narrow:
            self.vectors["mirror"][self.own].copy_(self.vectors["parameter"][self.own])

    @property
    def slot(self) -> Tensor:
        """Where this rank's gradients stay."""
        return own_of(self.slots, self._rank)

    @cached_property
    def source(self) -> Tensor:
        """What goes to the device."""
        return self.vectors["mirror" if self.narrow else "parameter"]

    def show(self, vector: Tensor) -> None:
        """The parameters become views of a vector on the device, used again and again."""
        for parameter, view in zip(self.parameters.values(), self._kept(vector), strict=True):
            parameter.data = view

    def hide(self, device: torch.device) -> None:
        """The parameters lose their memory."""
        if not self._nothing:
            one = torch.full((), torch.nan, dtype=self.precision.computed, device=device)
            self._nothing = [one.expand(shape) for shape in self.shapes.values()]
        for parameter, nothing in zip(self.parameters.values(), self._nothing, strict=True):
            parameter.data = nothing

    def collect(self, vector: Tensor) -> list[slice]:
        """Moves gradients that are there to a vector on the device, used again and again.

        Returns:
            the parts of the vector that they fill.
        """
        parts: list[slice] = []
        end = 0
        for parameter, view in zip(self.parameters.values(), self._kept(vector), strict=True):
            begin, end = end, end + view.numel()
            if parameter.grad is None:
                continue
            view.copy_(parameter.grad)
            parameter.grad = None
            if parts and parts[-1].stop == begin:
                begin = parts.pop().start
            parts.append(slice(begin, end))
        return parts

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector by the names of the parameters."""
        return named_parts(vector, self.shapes)

    def region(self, kind: str) -> str:
        """The name of the memory of one of its vectors."""
        return f"{self.name}/{kind}"

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [*self.named(vector).values()]

    def _kept(self, vector: Tensor) -> list[Tensor]:
        """Its views, made once: the training thread would spend more on them than on the rest."""
        address = vector.data_ptr()  # of no other vector, as the views keep the memory
        if address not in self._places:
            self._places[address] = self._views(vector)
        return self._places[address]


def own_of(vectors: Sequence[Tensor], rank: int) -> Tensor:
    """Where one rank writes: one vector may be for all, of which each has its chunk."""
    return vectors[rank if len(vectors) > 1 else 0]
