"""The optimizer in host memory: gradients are summed, measured and applied by AdamW."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.adam import Hyper, adam_, sum_of_squares
from shardlab.codecs.workers import Workers
from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective
from shardlab.comm.object_collectives import gather_values
from shardlab.engines.cpu_placement import RankLocation, place_here
from shardlab.engines.slide.copies import NodeContext
from shardlab.engines.slide.grad_offload import GradBuffer
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.prefetch import count_shared_memory
from shardlab.engines.slide.rank_progress import OFFLOADED, REDUCED, UPDATED
from shardlab.engines.slide.unit import SlideUnit, own_vector
from shardlab.models.memory import KeptGradients


class GradReduction:
    """Sum of gradients over ranks, micro-batches and nodes, in float32 and the order of ranks.

    Args:
        reduce_scatter: of this rank's vector with the others', by messages; None where ranks read
            each other's memory, or where what arrives is the mean already.
        average: between nodes, of the sum within each.
    """

    def __init__(
        self,
        context: NodeContext,
        keeping: KeptGradients,
        reduce_scatter: Collective | None,
        average: Collective | None,
    ) -> None:
        self._progress, self._ledger = context.progress, context.ledger
        self._groups, self._keeping = context.groups, keeping
        self._reduce, self._average = reduce_scatter, average

    def add(
        self, unit: SlideUnit, buffer: GradBuffer, first: bool, last: bool, scale: float
    ) -> list[Tensor]:
        """Add what has arrived in a buffer to the sums of a step.

        Args:
            first, last: whether it is of the first and of the last micro-batch of a step.
            scale: what the sum is multiplied by to be the gradient.

        Returns:
            after the last micro-batch, what adds up to this rank's chunk of the sum, in this order.
        """
        if self._keeping == "sums":
            if first:  # others may still apply what is there, if this rank has not used the unit
                self._progress.wait(UPDATED, unit.index, buffer.updates)
            _add(unit.slot, [buffer.own], first)
            self._progress.publish(REDUCED, unit.index, buffer.number)
            parts = self._over_ranks(unit, unit.slots, buffer.number, scale) if last else []
        else:
            parts = self._over_ranks(unit, buffer.vectors, buffer.number, scale)
        if self._keeping == "totals":
            total = unit.slot[unit.own]
            _add(total, parts, first)
            self._progress.publish(REDUCED, unit.index, buffer.number)
            parts = [total]
        if last and self._average is not None:
            total = _sum(parts)
            self._average.all_reduce(total, 1.0, unit.between_nodes)
            parts = [total]
        return parts

    def _over_ranks(
        self, unit: SlideUnit, vectors: Sequence[Tensor], number: int, scale: float
    ) -> list[Tensor]:
        """Return what adds up to this rank's chunk of the sum over ranks, or of the mean."""
        own = own_vector(vectors, self._groups.rank)
        if self._groups.sums:
            # published before the wait: ranks that wait for each other must all have published
            self._progress.publish(OFFLOADED, unit.index, number)
            count_shared_memory(self._ledger.accounts["gradients"], own, self._groups.world_size)
            self._progress.wait(OFFLOADED, unit.index, number)
            parts = [vector[unit.own] for vector in vectors]
            self._audit(parts, scale)
            return parts
        if self._reduce is not None:
            mean = torch.empty(unit.chunk, dtype=own.dtype)
            self._reduce.reduce_scatter(mean, own, 1 / self._groups.world_size, unit.message)
            own[unit.own].copy_(mean)
        return [own[unit.own]]

    def _audit(self, parts: Sequence[Tensor], scale: float) -> None:
        """Report the sum to an audit as exact: it was not encoded."""
        if self._ledger.audit is not None:
            mean = _sum(parts) * scale
            self._ledger.audit.add(mean, mean)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the float32 sum of vectors in their order; a single float32 vector is returned."""
    return reduce(torch.add, parts[1:], parts[0].float())


def _add(total: Tensor, parts: Sequence[Tensor], first: bool) -> None:
    """Add the sum of the parts to a float32 total, or set the total to it if `first`."""
    if first:
        total.copy_(_sum(parts))
    else:
        total.add_(_sum(parts))


class HostOptimizer:
    """Thread that waits for off-loaded gradients and updates this rank's chunk of their unit.

    Args:
        reduction: sums the gradients that arrive.
        workers: threads of the kernels; None: the thread itself computes.
        order: in which units are usually updated: moments are prefetched one unit ahead.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        context: NodeContext,
        reduction: GradReduction,
        workers: Workers | None,
        moments: MomentStore,
        order: Sequence[SlideUnit],
        seed: int,
    ) -> None:
        self.hyper = Hyper(0.0)
        """of the updates that are started from now on"""
        self.scale = 1.0
        """what the sum over ranks is multiplied by to be the gradient"""
        self._progress, self._errors = context.progress, context.errors
        self._reduction = reduction
        self._workers, self._moments, self._seed = workers, moments, seed
        self._following = dict(zip(order, [*order[1:], order[0]], strict=True))
        self._lane = Background("update")
        self._gradients: dict[int, list[Tensor]] = {}
        """what adds up to the gradient of this rank's chunk, by the index of the unit"""
        self._squares: dict[int, float] = {}
        self._last: Running | None = None

    def begin_step(self) -> None:
        """Begin a step, before its first gradient.

        Raises:
            OSError, UserError: moments could not be written to disk.
        """
        self._moments.check()
        self._squares.clear()

    def receive(
        self, unit: SlideUnit, copied: Running, buffer: GradBuffer, first: bool, last: bool
    ) -> None:
        """Queue the reduction of a buffer.

        Args:
            copied: copies the gradients to the buffer.
            first, last: see `GradReduction.add`.
        """
        add = self._errors.guard(self._reduce)
        self._last = self._lane.start(add, unit, copied, buffer, first, last, self.scale)

    def sum_of_squares(self) -> float:
        """Return that of this rank's part of the gradient, when all of it has been received."""
        if self._last is not None:
            self._last.wait()
        return math.fsum(self._squares.values())

    def update(self, unit: SlideUnit, coefficient: float = 1.0) -> None:
        """Queue the update of a unit by its gradient times the coefficient."""
        unit.updates += 1
        unit.step += 1
        numbers = unit.updates, int(unit.step)
        update = self._errors.guard(self._update)
        self._lane.start(update, unit, *numbers, self.hyper, self.scale * coefficient)

    def drain(self) -> None:
        """Return when all updates are done; raise the first error of any."""
        self._lane.drain()
        self._moments.drain()

    def _reduce(
        self,
        unit: SlideUnit,
        copied: Running,
        buffer: GradBuffer,
        first: bool,
        last: bool,
        scale: float,
    ) -> None:
        copied.synchronize()  # the CPU reads the bytes, so waiting for a stream is not enough
        parts = self._reduction.add(unit, buffer, first, last, scale)
        if last:
            self._gradients[unit.index] = parts
            squares = sum_of_squares(parts, scale, unit.first, self._workers)
            self._squares[unit.index] = squares

    @torch.no_grad()
    def _update(self, unit: SlideUnit, number: int, step: int, hyper: Hyper, scale: float) -> None:
        moments = self._moments.load(unit.name)
        # while the kernel runs
        self._moments.prefetch(self._following[unit].name)
        mirror = unit.vectors["mirror"][unit.own] if unit.narrow else None
        adam_(
            unit.vectors["parameter"][unit.own],
            *moments,
            self._gradients.pop(unit.index),
            hyper,
            step,
            scale,
            mirror,
            # neither of these depends on the number of ranks
            seed=_unit_seed(self._seed, unit.name),
            offset=unit.first,
            workers=self._workers,
        )
        # before moments are written: the next use of the unit needs its parameters alone
        self._progress.publish(UPDATED, unit.index, number)
        self._moments.store(unit.name)


def _unit_seed(run: int, unit: str) -> int:
    digest = hashlib.blake2b(f"{run}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def update_workers(here: dist.ProcessGroup, device: torch.device) -> Workers | None:
    """Return pinned threads for this rank's kernels, or None if the calling thread is enough.

    Next to a GPU they are all CPUs that the rank's placement has for workers: torchrun allows torch
    a single thread. On a CPU, which also runs the model, they are as many as torch computes with,
    on the same CPUs.

    Args:
        here: the ranks of the node, all of which call.
    """
    everyone = [
        RankLocation(**each) for each in gather_values(asdict(RankLocation.here(None)), here)
    ]
    placement = place_here(everyone)[dist.get_rank(here)]
    on_gpu = device.type == "cuda"
    cpus = placement.workers if on_gpu else placement.cpus
    threads = len(cpus) if on_gpu else torch.get_num_threads()
    return Workers(threads, cpus) if threads > 1 else None
