"""Flat units of `manual`, and the order in which they are gathered, freed and reduced."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from shardlab.codecs.base import Block, Unit
from shardlab.comm.background import Background, Running
from shardlab.comm.collective import REPLICAS, Collective
from shardlab.engines.flat import named_parts
from shardlab.engines.scheduling import UnitSchedule, VectorPool


class FlatUnit:
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
        self.name, self.parameters = name, dict(parameters)
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


class ManualSchedule(UnitSchedule):
    """Order of communication of one step, for units that are used one after another.

    forward   unit i is gathered while unit i - 1 computes, and freed after its use;
    backward  the same from the last unit to the first; the gradients of a unit are reduced while
              the units before it compute;
    finish    waits for the last reductions.

    The root (what belongs to no unit) is gathered first and kept until its gradients are there.
    The last unit stays between forward and backward, which begins with it. Gathers and reductions
    have a thread each on a CPU, a stream each on a GPU, and a process group each.

    Args:
        units: in the order of their use; the root is not among them.
        gather, reduce, average: each over another process group, the last over copies of the model.
        ahead: number of units to prefetch in forward and in backward.
        reduce_dtype: of gradients while they are reduced.
    """

    def __init__(
        self,
        root: FlatUnit,
        units: Sequence[FlatUnit],
        gather: Collective,
        reduce: Collective,
        average: Collective | None,
        ahead: tuple[int, int] = (1, 1),
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.root = root
        self.units = units
        self.reducing = True
        """whether this is the last backward pass of a step"""
        self._gather_by, self._reduce_by, self._average_by = gather, reduce, average
        self._ahead, self._ahead_backward = ahead
        self._backward = False
        device = root.shard.device
        self._gathers = Background("gather", device)
        self._reductions = Background("reduce", device, beside=self._gathers)
        self._pending: dict[str, Running] = {}
        self._vectors = VectorPool(reduce_dtype, device)
        self._missing: dict[str, int] = {}
        """parameters of each unit that have no gradient yet in this backward pass"""

    def begin(self) -> None:
        """Prepare the forward pass of the model."""
        self._backward = False
        self._missing = {
            unit.name: sum(p.requires_grad for p in unit.parameters.values())
            for unit in (self.root, *self.units)
        }
        self._start(self.root)
        self._start_all(range(self._ahead))
        self._wait(self.root)

    def before_forward(self, index: int) -> None:  # noqa: D102
        # recomputed by activation checkpointing: what comes next is before it, not after
        ahead = 0 if self._backward else self._ahead
        self._need(index, range(index + 1, index + 1 + ahead))

    def after_forward(self, index: int) -> None:  # noqa: D102
        unit = self.units[index]
        if not unit.kept and not self._backward and index + 1 < len(self.units):
            unit.free()

    def before_backward(self, index: int) -> None:  # noqa: D102
        self._backward = True
        before = range(index - 1, index - 1 - self._ahead_backward, -1)
        self._need(index, before)

    def accumulated(self, unit: FlatUnit) -> None:
        """Note that one more parameter of a unit has its gradient."""
        self._missing[unit.name] -= 1
        assert self._missing[unit.name] >= 0, f"{unit.name}: a gradient after its backward"
        if self._missing[unit.name] == 0:
            self._complete(unit)

    def after_backward(self) -> None:
        """Wait until the gradients of all shards are there, after a step's last backward pass."""
        for unit in (*reversed(self.units), self.root):
            if self._missing[unit.name] > 0:  # parameters that the model did not use
                self._missing[unit.name] = 0
                self._complete(unit)
        self._vectors.wait()
        for unit in (self.root, *self.units):
            unit.shard.grad = unit.gradient

    def _need(self, index: int, ahead: Iterable[int]) -> None:
        if self._backward and not self.units[index].needed_in_backward:
            self._start_all(ahead)
            return
        self._start(self.units[index])
        self._start_all(ahead)
        self._wait(self.units[index])

    def _start_all(self, indices: Iterable[int]) -> None:
        for index in indices:
            if 0 <= index < len(self.units):
                unit = self.units[index]
                if unit.needed_in_backward or not self._backward:
                    self._start(unit)

    def _start(self, unit: FlatUnit) -> None:
        if unit.allocated:
            return
        unit.allocate()
        self._gather_by.note_pass(unit.message, self._backward)
        self._pending[unit.name] = self._gathers.start(self._gather, unit)

    def _gather(self, unit: FlatUnit) -> None:
        collective, shard = self._gather_by, unit.shard.data.to(unit.full.dtype)
        if collective.world_size == 1:
            unit.full.copy_(shard)
        else:
            collective.all_gather(unit.full, shard, unit.message)

    def _wait(self, unit: FlatUnit) -> None:
        pending = self._pending.pop(unit.name, None)
        if pending is not None:
            with torch.profiler.record_function(f"shardlab::wait for {unit.name}"):
                pending.wait()

    def _complete(self, unit: FlatUnit) -> None:
        """Free a unit that has all its gradients, and start their reduction."""
        if unit is not self.root or self.reducing:
            self._wait(unit)  # a unit that the model did not use may still be on its way
            unit.free()
        self._gather_by.note_pass(unit.message, True)
        if not self.reducing:
            return
        vector = self._vectors.acquire(unit.full.numel())
        unit.collect(vector)
        running = self._reductions.start(self._reduce, unit, vector)
        self._vectors.release_after(running, vector)

    def _reduce(self, unit: FlatUnit, vector: Tensor) -> None:
        """Set the gradient of the shard to the mean over ranks of a vector of gradients."""
        collective, mean = self._reduce_by, unit.gradient
        if mean.dtype != vector.dtype:
            mean = torch.empty_like(unit.gradient, dtype=vector.dtype)
        if collective.world_size == 1:
            mean.copy_(vector)
        else:
            collective.reduce_scatter(mean, vector, 1 / collective.world_size, unit.message)
        if mean is not unit.gradient:
            unit.gradient.copy_(mean)
        average = self._average_by
        if average is not None:
            message = Unit(unit.name + REPLICAS, (Block(unit.name, unit.gradient.numel(), 1),))
            average.all_reduce(unit.gradient, 1 / average.world_size, message)
