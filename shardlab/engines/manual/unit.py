"""Parameters that are stored, gathered and reduced together."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardlab.codecs.unit import Block, Unit


class FlatUnit:
    """Some parameters as one vector, of which every rank keeps 1/W.

    The parameters lie one after another, then zeros up to W equal chunks; the shard is one chunk.
    The whole vector has memory only between `allocate` and `free`: the parameters are views of it,
    and so is what autograd saves of them, so it always comes back to the same storage.

    Args:
        name: the same on all ranks.
        parameters: float32, by name; they hold the same values on all ranks.
        rank, world_size: among those that share the vector.
        dtype: of the whole vector, so of what computes; the shard stays float32.
        kept: the vector stays between forward and backward.
        needed_in_backward: gradients cannot be computed without it.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        dtype: torch.dtype = torch.float32,
        kept: bool = False,
        needed_in_backward: bool = True,
    ) -> None:
        self.name = name
        self.kept = kept
        self.needed_in_backward = needed_in_backward
        self.parameters = dict(parameters)
        self.count = sum(p.numel() for p in parameters.values())
        """elements, without the zeros at the end"""
        self.message = Unit(name, (Block(name, self.count, 1),))
        length = -(-self.count // world_size)
        exact = torch.zeros(world_size * length)
        for parameter, view in zip(parameters.values(), self._views(exact), strict=True):
            view.copy_(parameter.data)
        self.shard = nn.Parameter(exact.chunk(world_size)[rank].clone())
        self.full = torch.empty(world_size * length, dtype=dtype)
        for parameter, view in zip(parameters.values(), self._views(self.full), strict=True):
            parameter.data = view
        self.gradient = torch.zeros(length)
        """of the shard, where the next step finds it"""
        self._storage = self.full.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.free()

    @property
    def allocated(self) -> bool:
        """Whether the parameters can be used, or are on their way."""
        return self._storage.nbytes() > 0

    def allocate(self) -> None:
        """Gives the whole vector memory, whatever is in it."""
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Takes the memory of the whole vector."""
        self._storage.resize_(0)

    def collect(self, vector: Tensor) -> None:
        """Moves the gradients of the parameters to `vector`, laid out as `full`."""
        end = 0
        for parameter, view in zip(self.parameters.values(), self._views(vector), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
            end += parameter.numel()
        vector[end:].zero_()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector that is laid out as `full`, by the names of the parameters."""
        return dict(zip(self.parameters, self._views(vector), strict=True))

    def _views(self, vector: Tensor) -> list[Tensor]:
        shapes = [parameter.shape for parameter in self.parameters.values()]
        sizes = [shape.numel() for shape in shapes]
        pieces = vector[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
