"""Transfers of the `slide` engine: parameters to the device, and gradients from it."""

from collections.abc import Callable, Mapping
from typing import ParamSpec

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running, wait_all
from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Account, Ledger
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.engines.scheduling import VectorPool
from shardlab.engines.slide_groups import RankGroups
from shardlab.engines.slide_memory import GradBuffers, GradSlot, SlideUnit, chunk_of

P = ParamSpec("P")

_BACKWARD_ENDS = -1
"""what ranks agree on in place of the index of a unit"""


class Copies:
    """Two lanes, to and from the device, each with a thread and an order of its own.

    What is started in a lane may wait, communicate and `copy`. It begins after what its caller had
    launched on the device before; what is launched after `Running.wait` begins after it, and
    `Running.wait_for_device` returns when its bytes have arrived.

    Args:
        one_thread: launches the calls of both lanes on a GPU, in the order in which they were
            started: for lanes that both communicate between devices, as NCCL may hang where ranks
            launch on two communicators in two orders.
    """

    def __init__(self, device: torch.device, one_thread: bool = False) -> None:
        self._accelerator = accelerator_of(device)
        self._inward = Background("in", device)
        self._outward = Background("out", device, beside=self._inward if one_thread else None)
        self._pinned: list[Tensor] = []
        """keep their memory until it is unpinned"""

    def start_in(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane to the device."""
        return self._inward.start(call, *args, **kwargs)

    def start_out(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane from the device."""
        return self._outward.start(call, *args, **kwargs)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a vector, within a call in a lane."""
        if self._accelerator is None:
            target.copy_(source)
        else:
            self._accelerator.copy(target, source)

    def check(self) -> None:
        """Raise the error of a call that has failed already."""
        self._inward.check()
        self._outward.check()

    def wait(self) -> None:
        """Wait until all calls have ended; raise one of their errors."""
        wait_all(self._inward, self._outward)

    def pin(self, tensor: Tensor) -> None:
        """Page-lock host memory that a GPU will copy from or to."""
        if self._accelerator is not None and tensor.nbytes:
            self._accelerator.page_lock(tensor)
            self._pinned.append(tensor)

    def unpin(self) -> None:
        """Undo every `pin`, when nothing is copied any more."""
        while self._accelerator is not None and self._pinned:
            self._accelerator.page_unlock(self._pinned.pop())


class Prefetcher:
    """Copies of units to the device, each as soon as its last update is done.

    Args:
        updated: of a unit, its last update where one has begun.
        gather: ranks load their own chunks and all-gather the rest on the device; None: every rank
            loads whole units.
    """

    def __init__(
        self,
        groups: RankGroups,
        copies: Copies,
        ledger: Ledger,
        updated: Mapping[int, Running],
        gather: Collective | None,
    ) -> None:
        self._groups, self._copies, self._ledger = groups, copies, ledger
        self._updated, self._gather = updated, gather
        self._rank, self._world_size = groups.rank, groups.world_size

    def start(
        self, unit: SlideUnit, vector: Tensor, step: int | None, in_backward: bool
    ) -> Running:
        """Fill a vector on the device, as long as the unit or as its trained part.

        Args:
            step: that uses it, and may not have begun; None if no step does.
        """
        self.note_pass(unit, in_backward)
        updated = self._updated.get(unit.index)
        return self._copies.start_in(self._fetch, unit, vector, updated, step)

    def note_pass(self, unit: SlideUnit, is_backward: bool) -> None:
        """See `Collective.note_pass`."""
        if self._gather is not None:
            self._gather.note_pass(unit.message, is_backward)

    def end_backward(self) -> Running | None:
        """Let ranks agree that a backward pass ends here; None where they need not."""
        return None if self._gather is None else self._copies.start_in(self._agree, _BACKWARD_ENDS)

    def count_step(self, step: int) -> None:
        """Count in the ledger what was fetched for a step, all of which has arrived."""
        self._ledger.merge_step(step)

    def _fetch(
        self, unit: SlideUnit, vector: Tensor, updated: Running | None, step: int | None
    ) -> None:
        if updated is not None:
            updated.wait()
        with self._ledger.step_accounts(step):
            if self._gather is not None:
                self._load_and_gather(unit, vector, self._gather)
                return
            self._copies.copy(vector, unit.source[: vector.numel()])
            if self._world_size > 1 and unit.count:  # no rank in particular owns frozen parameters
                trained = vector[: unit.size]
                count_shared_memory(self._ledger.accounts["weights"], trained, self._world_size)

    def _load_and_gather(self, unit: SlideUnit, vector: Tensor, gather: Collective) -> None:
        self._agree(unit.index)
        shard = chunk_of(vector, self._rank, self._world_size)
        source = unit.source[: vector.numel()]
        self._copies.copy(shard, chunk_of(source, self._rank, self._world_size))
        both = vector.numel() > unit.size
        gather.all_gather(vector, shard, unit.message_of_both if both else unit.message)

    def _agree(self, event: int) -> None:
        """Compare what all ranks do next: gathers of different units would mix up parameters.

        Raises:
            UserError: ranks use different layers.
        """
        events = torch.empty(self._world_size, dtype=torch.int64)
        torch_private.all_gather_single(events, torch.tensor([event]), group=self._groups.order)
        if bool((events != event).any()):
            raise UserError(
                "slide: ranks use different layers, or in another order, and with param_transfer: "
                "shard each gathers them from all: set param_transfer: full"
            )


def count_shared_memory(account: Account, vector: Tensor, world_size: int) -> None:
    """Count a vector that ranks read from each other's memory as if it were sent."""
    moved = vector.nbytes * (world_size - 1) / world_size
    account.collectives += 1
    account.bytes_raw += moved
    account.bytes_wire += moved


Receive = Callable[[SlideUnit, Running, GradSlot, bool, bool], None]
"""takes a unit, its copy to host memory, the slot, and whether the micro-batch is the first and
whether it is the last of the step"""


class GradOffload:
    """Copies of units' gradients to host memory, one unit after another.

    Args:
        receive: called for each unit whose copy has been queued.
        reduce: ranks reduce on the device, and each copies its chunk of the mean; None: each copies
            its whole vector.
    """

    def __init__(
        self,
        copies: Copies,
        buffers: GradBuffers,
        receive: Receive,
        reduce: Collective | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._copies, self._buffers = copies, buffers
        self._receive, self._reduce = receive, reduce
        self._vectors = VectorPool(dtype, device)

    def start(self, unit: SlideUnit, first: bool, last: bool) -> None:
        """Off-load the gradients of a unit: those that are there, and zeros for the others.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        vector = self._vectors.acquire(unit.size)
        unit.collect(vector)
        slot = self._buffers.slot(unit)
        target = slot.local[: self._buffers.size(unit)]
        copied = self._copies.start_out(self._move, unit, vector, target, slot.busy)
        self._vectors.release_after(copied, vector)
        self._receive(unit, copied, slot, first, last)

    def _move(self, unit: SlideUnit, vector: Tensor, target: Tensor, busy: Running | None) -> None:
        if self._reduce is not None:
            chunk = torch.empty(unit.chunk, dtype=vector.dtype, device=vector.device)
            self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
            vector = chunk
        if busy is not None:
            busy.wait()
        self._copies.copy(target, vector)
