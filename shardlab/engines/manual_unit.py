"""A unit of parameters that are stored, gathered and reduced as one vector."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from shardlab.codecs.unit import Block, Unit
from shardlab.engines.flat import named_parts
from shardlab.engines.scheduling import ParameterUnit


class FlatUnit(ParameterUnit):
    """Parameters as one flat vector, of which every rank keeps 1/W.

    The parameters lie one after another, then zeros up to W equal chunks; the shard is one chunk.
    The whole vector has memory only between `allocate` and `free`. The parameters, and what
    autograd saves of them, are views of it, so its storage is resized and never replaced.

    The shard has its memory from the beginning: allocated later, shards would fragment the memory
    that whole units leave. `store` fills it.

    Args:
        name: the same on all ranks.
        parameters: float32, by name; `store` reads their values.
        rank, world_size: in the group that shares the vector.
        dtype: of the whole vector, and so of computation; the shard stays float32.
        kept: the vector stays allocated between forward and backward.
        needed_in_backward: gradients cannot be computed without it.
        device: of the shard.
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
        device: torch.device | None = None,
    ) -> None:
        super().__init__(name, parameters)
        self.kept = kept
        self.needed_in_backward = needed_in_backward
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.count = sum(p.numel() for p in parameters.values())
        """elements, without the zeros at the end"""
        self.message = Unit(name, (Block(name, self.count, 1),))
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self.shard = nn.Parameter(torch.empty(-(-self.count // world_size), device=device))

    def store(self) -> None:
        """Take over the values of the parameters, the same on all ranks, and free their memory."""
        whole = self.shard.new_zeros(self._world_size * self.shard.numel(), requires_grad=False)
        self._point_to(whole, take=True)
        self.shard.data.copy_(whole.chunk(self._world_size)[self._rank])
        self.full = whole.to(self._dtype)
        self._point_to(self.full, take=False)
        self._storage = self.full.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.free()

    def _point_to(self, whole: Tensor, take: bool) -> None:
        """Make the parameters views of `whole`, after a copy of their values if `take`."""
        for parameter, view in zip(self.parameters.values(), self._views(whole), strict=True):
            if take:
                view.copy_(parameter.data)
            parameter.data = view

    @cached_property
    def gradient(self) -> Tensor:
        """Gradient of the shard, in memory that every step uses."""
        return torch.empty_like(self.shard.data)

    @property
    def allocated(self) -> bool:
        """Return whether the parameters can be used, or are being gathered."""
        return self._storage.nbytes() > 0

    def allocate(self) -> None:
        """Allocate the whole vector, uninitialised."""
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Free the memory of the whole vector."""
        self._storage.resize_(0)

    def collect(self, vector: Tensor) -> None:
        """Move the gradients of the parameters to `vector`, laid out as `full`; zeros for none."""
        for parameter, view in zip(self.parameters.values(), self._views(vector), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
        vector[self.count :].zero_()

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [*named_parts(vector, self.shapes).values()]
