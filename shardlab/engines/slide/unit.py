"""Parameters that slide together: in host memory all the time, on the device for their use."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.layout import REPLICAS
from shardlab.core.errors import UserError
from shardlab.engines.common.flat import named_parts
from shardlab.engines.slide.moments import KINDS
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.node_file import NodeFile

FROZEN = "frozen"
"""the vector of parameters that are not trained"""
_FLOAT = torch.float32.itemsize


class Precision(NamedTuple):
    """The types of one unit's vectors beside float32 parameters."""

    computed: torch.dtype
    """of the parameters on the device"""
    landed: torch.dtype
    """of gradients that arrive in host memory"""
    kept: torch.dtype
    """of gradients that stay there"""
    moments: torch.dtype


class SlidUnit:
    """Some parameters as one vector: what is trained, 1/W by each rank of a node, then what is not.

    In each part the parameters lie one after another, then zeros up to W equal chunks. Host memory,
    which the ranks share, holds the trained part in float32, a mirror of it in the type that
    computes where that is narrower, and gradients that stay until they are applied. It holds the
    frozen part once, in the type that computes, behind that of the trained one which goes to the
    device: one copy takes both. `map` gives the unit that memory, `map_moments` that of the moments
    of what is trained.

    Outside of its use a parameter has no memory on the device: every element of it is NaN, so that
    whoever uses it then finds out.

    Args:
        index: in the order of use; the root comes first.
        parameters: by name; with their shapes, but not yet their values. Those whose
            `requires_grad` is False stay frozen.
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
        self.shapes = {n: p.shape for n, p in parameters.items() if p.requires_grad}
        """of what is trained"""
        self.frozen_shapes = {n: p.shape for n, p in parameters.items() if not p.requires_grad}
        self.parameters = {n: parameters[n] for n in (*self.shapes, *self.frozen_shapes)}
        self.count = _elements(self.shapes)
        """elements that are trained, without the zeros at the end"""
        self.chunk = -(-self.count // world_size)
        self.size = world_size * self.chunk
        """elements of the trained part"""
        self.whole = self.size + world_size * -(-_elements(self.frozen_shapes) // world_size)
        """elements of both parts"""
        self.own = slice(rank * self.chunk, (rank + 1) * self.chunk)
        """what this rank updates"""
        self.first = rank * self.chunk
        self.precision = precision
        self.message = Unit(name, (Block(name, self.count, 1),))
        """what is trained"""
        self.message_of_both = Unit(name, (Block(name, self.whole, 1),))
        self.between_nodes = Unit(name + REPLICAS, (Block(name, self.chunk, 1),))
        self.step = torch.zeros(())
        """updates so far"""
        self.updates = 0
        """that this process has begun"""
        self._rank, self._world_size, self._slots = rank, world_size, slots
        self._places: dict[int, list[Tensor]] = {}
        """the parameters in vectors on the device, by their addresses"""
        self._nothing: list[Tensor] = []
        """what they are without memory"""
        self.vectors: dict[str, Tensor] = {}
        """whole: `parameter`, `exp_avg`, `exp_avg_sq`, perhaps `mirror`; and `frozen`"""
        self.source = torch.empty(0)
        """what goes to the device, both parts of it"""
        self.slots: list[Tensor] = []

    @property
    def narrow(self) -> bool:
        """Whether the device computes with a mirror."""
        return self.precision.computed is not torch.float32

    def layout(self) -> dict[str, int]:
        """Bytes of the regions of host memory, without moments."""
        itemsize = self.precision.computed.itemsize
        kinds = {"parameter": self.size * _FLOAT}
        if self.narrow:
            kinds["mirror"] = self.size * itemsize
        kinds[self._shown] += (self.whole - self.size) * itemsize
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
        shown, dtype = self.region(self._shown), self.precision.computed
        self.source = memory.tensor(shown, dtype, (self.whole,))
        self.vectors[FROZEN] = self.source[self.size :]
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
        """This rank's chunks take the values of the parameters, the same on all ranks."""
        for kind in ("parameter", FROZEN):
            vector = self.vectors[kind]
            whole = torch.zeros_like(vector)
            for name, view in named_parts(whole, self._shapes_in(kind)).items():
                view.copy_(self.parameters[name].data)
            own = chunk_of(vector, self._rank, self._world_size)
            own.copy_(chunk_of(whole, self._rank, self._world_size))

    def check(self) -> None:
        """Looks whether the parameters that are trained are still those of the beginning.

        Raises:
            UserError: somebody has frozen one, or the reverse.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad is not (name in self.shapes):
                raise UserError(
                    f"slide: requires_grad of {name} has been set to {parameter.requires_grad}: "
                    "set it back, or build the engine anew from a model that begins so"
                )

    @torch.no_grad()
    def refresh(self) -> None:
        """The mirror of this rank's chunk follows parameters that somebody has written to."""
        if self.narrow:
            self.vectors["mirror"][self.own].copy_(self.vectors["parameter"][self.own])

    @property
    def own_source(self) -> Tensor:
        """This rank's chunk of what goes to the device: of the trained part, and of both."""
        end = (self._rank + 1) * (self.whole // self._world_size)
        return self.source[self.first : end]

    @property
    def slot(self) -> Tensor:
        """Where this rank's gradients stay."""
        return own_of(self.slots, self._rank)

    def show(self, vector: Tensor) -> None:
        """The parameters become views of a vector on the device, used again and again."""
        for parameter, view in zip(self.parameters.values(), self._kept(vector), strict=True):
            parameter.data = view

    def hide(self, device: torch.device) -> None:
        """The parameters lose their memory."""
        if not self._nothing:
            one = torch.full((), torch.nan, dtype=self.precision.computed, device=device)
            self._nothing = [one.expand(p.shape) for p in self.parameters.values()]
        for parameter, nothing in zip(self.parameters.values(), self._nothing, strict=True):
            parameter.data = nothing

    def collect(self, vector: Tensor) -> list[slice]:
        """Moves gradients that are there to a vector on the device, used again and again.

        Returns:
            the parts of the vector that they fill.
        """
        parts: list[slice] = []
        end = 0
        for name, view in zip(self.shapes, self._kept(vector), strict=True):
            parameter = self.parameters[name]
            begin, end = end, end + view.numel()
            if parameter.grad is None:
                continue
            view.copy_(parameter.grad)
            parameter.grad = None
            if parts and parts[-1].stop == begin:
                begin = parts.pop().start
            parts.append(slice(begin, end))
        return parts

    def named(self, kind: str) -> dict[str, Tensor]:
        """The parts of one of its vectors by the names of the parameters, if it has any there."""
        shapes = self._shapes_in(kind)
        return named_parts(self.vectors[kind], shapes) if shapes else {}

    def region(self, kind: str) -> str:
        """The name of the memory of one of its vectors."""
        return f"{self.name}/{kind}"

    @property
    def _shown(self) -> str:
        """The kind of vector that goes to the device."""
        return "mirror" if self.narrow else "parameter"

    def _shapes_in(self, kind: str) -> dict[str, torch.Size]:
        return self.frozen_shapes if kind == FROZEN else self.shapes

    def _kept(self, vector: Tensor) -> list[Tensor]:
        """Its views, made once: the training thread would spend more on them than on the rest."""
        address = vector.data_ptr()  # of no other vector, as the views keep the memory
        if address not in self._places:
            parts = [named_parts(vector, self.shapes)]
            if vector.numel() > self.size:  # not gradients
                parts.append(named_parts(vector[self.size :], self.frozen_shapes))
            self._places[address] = [view for part in parts for view in part.values()]
        return self._places[address]


def chunk_of(vector: Tensor, rank: int, world_size: int) -> Tensor:
    """One of W equal parts."""
    size = vector.numel() // world_size
    return vector[rank * size : (rank + 1) * size]


def own_of(vectors: Sequence[Tensor], rank: int) -> Tensor:
    """Where one rank writes: one vector may be for all, of which each has its chunk."""
    return vectors[rank if len(vectors) > 1 else 0]


def _elements(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
