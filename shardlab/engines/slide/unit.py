"""Parameters that move together: always in host memory, on the device while they are used."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import REPLICAS
from shardlab.core.errors import UserError
from shardlab.engines.flat import named_parts
from shardlab.engines.scheduling import ParameterUnit
from shardlab.engines.slide.moments import KINDS
from shardlab.engines.slide.shared_file import NodeFile
from shardlab.engines.slide.shared_memory import NodeMemory

FROZEN = "frozen"
"""the vector of parameters that are not trained"""


class Precision(NamedTuple):
    """Types of a unit's vectors other than the float32 parameters."""

    compute: torch.dtype
    """of the parameters on the device"""
    offload: torch.dtype
    """of gradients that are copied to host memory"""
    stored: torch.dtype
    """of gradients that stay there until they are applied"""
    moments: torch.dtype


class SlideUnit(ParameterUnit):
    """Some parameters as one vector: the trained ones, 1/W by each rank of a node, then the frozen.

    In each part the parameters lie one after another, then zeros up to W equal chunks. Host memory,
    which the ranks share, holds the trained part in float32, a mirror of it in the compute type
    where that is narrower, and gradients that stay until they are applied. It holds the frozen part
    once, in the compute type, right behind that version of the trained part which goes to the
    device: one copy takes both. `map` gives the unit that memory, `map_moments` that of the moments
    of the trained part.

    Outside of its use a parameter has no memory on the device: every element of it is NaN, so that
    a use at the wrong time shows.

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
        self.index = index
        self.shapes = {n: p.shape for n, p in parameters.items() if p.requires_grad}
        """of trained parameters"""
        self.frozen_shapes = {n: p.shape for n, p in parameters.items() if not p.requires_grad}
        names = (*self.shapes, *self.frozen_shapes)
        super().__init__(name, {n: parameters[n] for n in names})
        self.count = _elements(self.shapes)
        """trained elements, without the zeros at the end"""
        self.chunk = -(-self.count // world_size)
        self.size = world_size * self.chunk
        """elements of the trained part"""
        self.whole = self.size + world_size * -(-_elements(self.frozen_shapes) // world_size)
        """elements of both parts"""
        self.own = slice(rank * self.chunk, (rank + 1) * self.chunk)
        """the chunk that this rank updates"""
        self.first = rank * self.chunk
        self.precision = precision
        self.message = Unit(name, (Block(name, self.count, 1),))
        """the trained part"""
        self.message_of_both = Unit(name, (Block(name, self.whole, 1),))
        self.between_nodes = Unit(name + REPLICAS, (Block(name, self.chunk, 1),))
        self.step = torch.zeros(())
        """updates so far, continued from a checkpoint"""
        self.updates = 0
        """that this process has begun"""
        self._rank, self._world_size, self._slots = rank, world_size, slots
        self._views: dict[int, list[Tensor]] = {}
        """the parameters in vectors on the device, by their addresses"""
        self._nan: list[Tensor] = []
        """the parameters outside of their use"""
        self.vectors: dict[str, Tensor] = {}
        """whole: `parameter`, `exp_avg`, `exp_avg_sq`, `frozen`, perhaps `mirror`, `gradientN`"""
        self.source = torch.empty(0)
        """both parts of what goes to the device"""
        self.slots: list[Tensor] = []

    @property
    def narrow(self) -> bool:
        """Return whether the device computes with a mirror."""
        return self.precision.compute is not torch.float32

    def layout(self) -> dict[str, int]:
        """Return the bytes of each region of host memory, without moments."""
        sizes = {kind: self.size * dtype.itemsize for kind, dtype in self._dtypes.items()}
        sizes[self._source_kind] += (self.whole - self.size) * self.precision.compute.itemsize
        return {self.region(kind): size for kind, size in sizes.items()}

    def moments_layout(self) -> dict[str, int]:
        """Return the bytes of each region of moments."""
        size = self.size * self.precision.moments.itemsize
        return {self.region(kind): size for kind in KINDS}

    def map(self, memory: NodeMemory) -> None:
        """Take the unit's regions."""
        for kind, dtype in self._dtypes.items():
            self.vectors[kind] = memory.tensor(self.region(kind), dtype, (self.size,))
        source, dtype = self.region(self._source_kind), self.precision.compute
        self.source = memory.tensor(source, dtype, (self.whole,))
        self.vectors[FROZEN] = self.source[self.size :]
        self.slots = [self.vectors[f"gradient{slot}"] for slot in range(self._slots)]

    def map_moments(self, where: NodeMemory | NodeFile) -> None:
        """Take the regions of the unit's moments."""
        for kind in KINDS:
            dtype = self.precision.moments
            self.vectors[kind] = where.tensor(self.region(kind), dtype, (self.size,))

    def store(self) -> None:
        """Copy the parameters, the same on all ranks, to this rank's chunks of host memory."""
        for kind in ("parameter", FROZEN):
            vector = self.vectors[kind]
            whole = torch.zeros_like(vector)
            for name, view in named_parts(whole, self._shapes_in(kind)).items():
                view.copy_(self.parameters[name].data)
            own = chunk_of(vector, self._rank, self._world_size)
            own.copy_(chunk_of(whole, self._rank, self._world_size))

    def check(self) -> None:
        """Check that the trained parameters are still those of the beginning.

        Raises:
            UserError: `requires_grad` of one was changed.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad is not (name in self.shapes):
                raise UserError(
                    f"slide: requires_grad of {name} has been set to {parameter.requires_grad}: "
                    "set it back, or build a new engine from a model with this choice"
                )

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the mirror of this rank's chunk after a write to the parameters."""
        if self.narrow:
            self.vectors["mirror"][self.own].copy_(self.vectors["parameter"][self.own])

    @property
    def own_source(self) -> Tensor:
        """This rank's chunk of what goes to the device: of the trained part, and of both."""
        end = (self._rank + 1) * (self.whole // self._world_size)
        return self.source[self.first : end]

    @property
    def slot(self) -> Tensor:
        """The vector in which this rank's gradients stay."""
        return own_vector(self.slots, self._rank)

    def bind(self, vector: Tensor) -> None:
        """Make the parameters views of a vector on the device, which is used again and again."""
        for parameter, view in zip(self.parameters.values(), self._views_of(vector), strict=True):
            parameter.data = view

    def unbind(self, device: torch.device) -> None:
        """Make the parameters NaN, without memory."""
        if not self._nan:
            one = torch.full((), torch.nan, dtype=self.precision.compute, device=device)
            self._nan = [one.expand(p.shape) for p in self.parameters.values()]
        for parameter, nan in zip(self.parameters.values(), self._nan, strict=True):
            parameter.data = nan

    def collect(self, vector: Tensor) -> list[slice]:
        """Move gradients that are there to a vector on the device, which is used again and again.

        Returns:
            the parts of the vector that they fill.
        """
        parts: list[slice] = []
        end = 0
        for name, view in zip(self.shapes, self._views_of(vector), strict=True):
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
        """Return the parts of one of its vectors by parameter, if it has any of that kind."""
        shapes = self._shapes_in(kind)
        return named_parts(self.vectors[kind], shapes) if shapes else {}

    def region(self, kind: str) -> str:
        """Return the name of the region of one of its vectors."""
        return f"{self.name}/{kind}"

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        """Types of the vectors in host memory other than moments."""
        dtypes = {"parameter": torch.float32}
        if self.narrow:
            dtypes["mirror"] = self.precision.compute
        return dtypes | {f"gradient{slot}": self.precision.stored for slot in range(self._slots)}

    @property
    def _source_kind(self) -> str:
        return "mirror" if self.narrow else "parameter"

    def _shapes_in(self, kind: str) -> dict[str, torch.Size]:
        return self.frozen_shapes if kind == FROZEN else self.shapes

    def _views_of(self, vector: Tensor) -> list[Tensor]:
        """Return cached views: the training thread would spend more on them than on the rest."""
        address = vector.data_ptr()  # of no other vector, as the views keep the memory
        if address not in self._views:
            parts = [named_parts(vector, self.shapes)]
            if vector.numel() > self.size:  # parameters; gradients have no frozen part
                parts.append(named_parts(vector[self.size :], self.frozen_shapes))
            self._views[address] = [view for part in parts for view in part.values()]
        return self._views[address]


def chunk_of(vector: Tensor, rank: int, world_size: int) -> Tensor:
    """Return one of W equal parts."""
    size = vector.numel() // world_size
    return vector[rank * size : (rank + 1) * size]


def own_vector(vectors: Sequence[Tensor], rank: int) -> Tensor:
    """Return the vector that a rank writes to: its own, or the one that all ranks share."""
    return vectors[rank if len(vectors) > 1 else 0]


def _elements(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
