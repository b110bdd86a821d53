"""The optimizer in host memory: gradients are summed, measured and applied by AdamW."""

import hashlib
import math
import os
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Ledger
from shardlab.comm.object_collectives import gather_values
from shardlab.engines.slide_groups import RankGroups
from shardlab.engines.slide_memory import FROZEN, GradBuffers, GradSlot, SlideUnit
from shardlab.engines.slide_transfers import count_shared_memory
from shardlab.kernels.adam import Hyper, adam_, sum_of_squares
from shardlab.kernels.cpu_placement import RankLocation, place_here
from shardlab.kernels.workers import Workers


class HostOptimizer:
    """Thread that adds up off-loaded gradients and updates this rank's chunk of their unit.

    Gradients are summed in float32 and the order of ranks. All ranks do the same in one order, with
    a barrier before they read each other's gradients and one after each update: when an update has
    ended here, it has on all ranks of the node.

    Args:
        reduce_scatter: of this rank's gradient with the others', by messages; None where ranks read
            each other's memory, or where what arrives is the mean already.
        average: between nodes, of the sum within each.
        workers: threads of the kernels; None: the thread itself computes.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        groups: RankGroups,
        buffers: GradBuffers,
        reduce_scatter: Collective | None,
        average: Collective | None,
        ledger: Ledger,
        workers: Workers | None,
        seed: int,
    ) -> None:
        self.hyper = Hyper(0.0)
        """of the updates that are started from now on"""
        self.scale = 1.0
        """what the sum over ranks is multiplied by to be the gradient"""
        self.updated: dict[int, Running] = {}
        """the last update of units, by their index"""
        self._groups, self._buffers, self._ledger = groups, buffers, ledger
        self._reduce_scatter, self._average = reduce_scatter, average
        self._workers, self._seed = workers, seed
        self._lane = Background("update")
        self._arrived: dict[int, GradSlot] = {}
        """slots that an update frees, by the index of the unit"""
        self._gradients: dict[int, list[Tensor]] = {}
        """what adds up to the gradient of this rank's chunk, by the index of the unit"""
        self._squares: dict[int, float] = {}
        self._last: Running | None = None

    def begin_step(self) -> None:
        """Begin a step, before its first gradient."""
        self._squares.clear()

    def check(self) -> None:
        """Raise the error of an update that has failed already."""
        self._lane.check()

    def receive(
        self, unit: SlideUnit, copied: Running, slot: GradSlot, first: bool, last: bool
    ) -> None:
        """Queue the reduction of a gradient.

        Args:
            copied: copies it to the slot.
            first, last: whether it is of the first and of the last micro-batch of a step.
        """
        added = self._lane.start(self._add, unit, copied, slot, first, last, self.scale)
        self._last = slot.busy = added
        if self._buffers.keeping != "sums":
            self._arrived[unit.index] = slot

    def sum_of_squares(self) -> float:
        """Return that of this rank's part of the gradient, when all of it has been received."""
        if self._last is not None:
            self._last.wait()
        return math.fsum(self._squares.values())

    def update(self, unit: SlideUnit, coefficient: float = 1.0) -> None:
        """Queue the update of a unit by its gradient times the coefficient."""
        unit.step += 1
        scale = self.scale * coefficient
        update = self._lane.start(self._update, unit, int(unit.step), self.hyper, scale)
        self.updated[unit.index] = update
        if unit.index in self._arrived:
            self._arrived.pop(unit.index).busy = update

    def wait(self) -> None:
        """Wait until all updates are done; raise the first error of any."""
        self._lane.wait()

    def _add(
        self,
        unit: SlideUnit,
        copied: Running,
        slot: GradSlot,
        first: bool,
        last: bool,
        scale: float,
    ) -> None:
        """Add a gradient to the sum of a step; after the last one, over ranks and nodes, too."""
        copied.wait_for_device()  # the CPU reads the bytes, so waiting for a stream is not enough
        gradient = slot.of(self._buffers.size(unit))
        if self._buffers.keeping == "sums":
            total = self._buffers.total(unit)
            if first:
                total.local.copy_(gradient.local)
            else:
                total.local.add_(gradient.local)
            gradient = total
        if not last:
            return
        parts = self._over_ranks(unit, gradient, scale)
        if self._average is not None:
            total_of_node = _sum(parts)
            self._average.all_reduce(total_of_node, 1.0, unit.between_nodes)
            parts = [total_of_node]
        self._gradients[unit.index] = parts
        self._squares[unit.index] = sum_of_squares(parts, scale, unit.first, self._workers)

    def _over_ranks(self, unit: SlideUnit, gradient: GradSlot, scale: float) -> list[Tensor]:
        """Return what adds up to this rank's chunk of the sum over ranks, or of the mean."""
        local = gradient.local
        if self._groups.sums:
            count_shared_memory(self._ledger.accounts["gradients"], local, self._groups.world_size)
            dist.barrier(self._groups.updates)
            parts = [vector[unit.shard] for vector in gradient.vectors]
            if self._ledger.audit is not None:  # the sum was not encoded
                mean = _sum(parts) * scale
                self._ledger.audit.add(mean, mean)
            return parts
        if self._reduce_scatter is not None:
            mean = torch.empty(unit.chunk, dtype=local.dtype)
            self._reduce_scatter.reduce_scatter(
                mean, local, 1 / self._groups.world_size, unit.message
            )
            local[unit.shard].copy_(mean)
            return [local[unit.shard]]
        return [local]

    @torch.no_grad()
    def _update(self, unit: SlideUnit, step: int, hyper: Hyper, scale: float) -> None:
        shards = {
            kind: vector[unit.shard] for kind, vector in unit.vectors.items() if kind != FROZEN
        }
        adam_(
            shards["parameter"],
            shards["exp_avg"],
            shards["exp_avg_sq"],
            self._gradients.pop(unit.index),
            hyper,
            step,
            scale,
            shards.get("mirror"),
            # neither of these depends on the number of ranks
            seed=_unit_seed(self._seed, unit.name),
            offset=unit.first,
            workers=self._workers,
        )
        if self._groups.world_size > 1:
            dist.barrier(self._groups.updates)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the float32 sum of vectors in their order; a single float32 vector is returned."""
    return reduce(torch.add, parts[1:], parts[0].float())


def _unit_seed(run: int, unit: str) -> int:
    digest = hashlib.blake2b(f"{run}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def update_workers(here: dist.ProcessGroup, device: torch.device) -> Workers | None:
    """Return threads for this rank's kernels, or None if the calling thread is enough.

    Next to a GPU they are bound to the CPUs that the rank's placement has for workers, so that its
    control cores stay free: torchrun allows torch a single thread. On a CPU, which also runs the
    model, they are as many as torch computes with.

    Args:
        here: the ranks of the node, all of which call.
    """
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return Workers(threads) if threads > 1 else None
    masks = gather_values(sorted(os.sched_getaffinity(0)), here)
    placements = place_here([RankLocation(cpus) for cpus in masks])
    cpus = placements[dist.get_rank(here)].workers
    return Workers(len(cpus), cpus) if len(cpus) > 1 else None
