"""All-to-all and all-gather of bytes between the ranks of a group, timed, and in pieces on gloo.

gloo sends one large message in one direction at a time: two ranks that exchange 16 MiB use about
half of a full-duplex link. Pieces of 256 KiB or of 1 MiB make it full duplex; the smaller ones take
up to several times as long where no link limits them. With more than two ranks, a rank exchanges
with one other rank after another: concurrent streams to several ranks congest the same receivers,
share their links unevenly and leave some idle at the end. So a message is cut at least in halves
and at most two pieces are in flight: it has nearly ended before the next begins. Small messages are
sent to all ranks at once. Figures: `benchmarks/transport.py`. Pieces are slices of the caller's
buffers: nothing is copied, except from and to a GPU, whose memory gloo cannot send.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import zip_longest
from threading import Lock
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.background import Background
from shardlab.comm.emulated_link import LinkThrottle
from shardlab.core.device import Timestamp, now, seconds_between

PIECE = 1 << 20
"""bytes at most"""
SMALL = 1 << 17
"""bytes: shorter messages are not cut, and AT_ONCE times as many are always in flight"""
AT_ONCE = 2
"""maximum number of pieces in flight, in each direction"""
_TAG = 0x51AB
"""separates these messages from those of the program between the same ranks"""

_Future = torch.futures.Future[object]


class IssuedOperation(NamedTuple):
    """Operation that was issued."""

    device: torch.device
    carried: float | None
    """when an emulated link has carried its bytes; None: they use no link"""
    begin: Timestamp | None


class _DeviceStep(NamedTuple):
    """Operations of a step on a GPU."""

    begin: Timestamp
    """that times are relative to: as float32 milliseconds, as CUDA gives them, they are exact to a
    microsecond for some seconds only"""
    spans: list[tuple[Timestamp, Timestamp]]

    def seconds(self) -> float:
        """Return the length of the union of the spans; the host waits for their ends."""
        # and for the begin: a stream with an operation of an earlier step may be past its end
        for moment in (self.begin, *(end for _, end in self.spans)):
            if isinstance(moment, torch.cuda.Event):
                moment.synchronize()
        total = covered = 0.0
        for begin, end in sorted(
            (seconds_between(self.begin, begin), seconds_between(self.begin, end))
            for begin, end in self.spans
        ):
            total += max(0.0, end - max(begin, covered))
            covered = max(covered, end)
        return total


class Traffic:
    """Timer of the operations of all collectives that share one ledger, from issue to end.

    The bytes of an operation are those that this rank sends to others, or those that it receives if
    these are more. Operations without bytes are ignored. An operation on a GPU lasts from when the
    stream that issues it has come to it until the stream that waits for it goes on.
    """

    def __init__(self) -> None:
        self.throttle: LinkThrottle | None = None
        """emulates a link: operations end later"""
        # operations end in the threads of the backend, too
        self._lock = Lock()
        self._under_way = 0
        self._since = self._before = self._at_begin = 0.0
        self._step: _DeviceStep | None = None
        """on a GPU, from the first `begin_step` on"""
        self._unread: list[tuple[_DeviceStep, Callable[[float], None]]] = []

    @property
    def seconds(self) -> float:
        """Wall time so far with at least one operation on host memory under way."""
        with self._lock:
            return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)

    def begin_step(self, device: torch.device) -> None:
        """Begin a step of which the time in operations is asked for."""
        if device.type == "cuda":
            self._step = _DeviceStep(now(device), [])
        self._at_begin = self.seconds

    def end_step(self, read: Callable[[float], None]) -> None:
        """End the step; what was launched by then belongs to it.

        Args:
            read: called with the seconds with at least one operation under way: now, or for a GPU
                by `wait`.
        """
        if self._step is None:
            read(self.seconds - self._at_begin)
        else:
            # operations between steps may still end, for nobody
            step, self._step = self._step, _DeviceStep(self._step.begin, [])
            self._unread.append((step, read))

    def wait(self) -> None:
        """Read the times of all steps; the host waits for the GPU."""
        unread, self._unread = self._unread, []
        for step, read in unread:
            read(step.seconds())

    def begin(
        self, nbytes: float, device: torch.device, group: dist.ProcessGroup
    ) -> IssuedOperation | None:
        """Note the start of an operation; None if it has no bytes.

        Args:
            device: of the bytes, here and below.
            group: of the ranks that take part, here and below.
        """
        if nbytes == 0:
            return None
        begin = None
        if device.type == "cuda":
            begin = now(device) if self._step is not None else None
        else:
            with self._lock:
                if self._under_way == 0:
                    self._since = time.perf_counter()
                self._under_way += 1
        link = self.throttle
        carried = link.carry(nbytes) if link is not None and link.connects(group) else None
        return IssuedOperation(device, carried, begin)

    def end(
        self, operation: IssuedOperation | None, failed: bool = False, late: bool = False
    ) -> None:
        """Note the end of an operation, when the emulated link has carried its bytes.

        Args:
            late: the delay of the link begins now, when the last rank has sent its bytes.
        """
        if operation is None:
            return
        carried = operation.carried
        if self.throttle is not None and carried is not None and not failed:
            self.throttle.end(max(carried, time.perf_counter()) if late else carried)
        if operation.begin is not None:
            assert self._step is not None, "there was one when the operation began"
            self._step.spans.append((operation.begin, now(operation.device)))
        elif operation.device.type != "cuda":
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self._before += time.perf_counter() - self._since

    @contextmanager
    def operation(
        self, nbytes: float, device: torch.device, group: dist.ProcessGroup
    ) -> Iterator[None]:
        """Time a blocking operation; at the end of the block this thread waits for the link."""
        operation, failed = self.begin(nbytes, device, group), True
        try:
            yield
            failed = False
        finally:
            self.end(operation, failed, late=True)

    def ending(
        self,
        start: Callable[[], dist.Work],
        nbytes: float,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> tuple[dist.Work, _Future]:
        """Start an operation that ends by itself, concurrently with computation.

        Returns:
            The operation, and the future of its end on the emulated link, with the value of
            `Work.get_future()`.
        """
        operation = self.begin(nbytes, device, group)
        work = start()
        done: _Future = work.get_future()
        if operation is None or operation.carried is None:
            # torch runs it, on a GPU, with a stream that waits for the operation alone
            return work, done.then(partial(self._ended, operation))
        later: _Future = torch.futures.Future()

        def arrived(done: _Future, carried: float = operation.carried) -> None:
            ended = operation._replace(carried=max(carried, time.perf_counter()))
            self._link.start(self._end_late, ended, done, later)

        done.add_done_callback(arrived)
        return work, later

    @cached_property
    def _link(self) -> Background:
        """Thread that waits for the link: gloo's own threads are needed for other operations."""
        return Background("link")

    def _end_late(self, operation: IssuedOperation, done: _Future, later: _Future) -> None:
        try:
            later.set_result(self._ended(operation, done))
        except RuntimeError as error:
            later.set_exception(error)

    def _ended(self, operation: IssuedOperation | None, done: _Future) -> object:
        self.end(operation)
        return done.value()


class Transport:
    """All-to-all and all-gather of bytes over one process group.

    Messages between two ranks arrive in the order of the calls, so all ranks of a group make the
    same calls in the same order, as in torch; groups are independent. A rank sends nothing to
    itself.

    Args:
        traffic: times the operations.

    Raises:
        RuntimeError: (all methods) a rank has ended or does not answer; names the rank.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic | None = None) -> None:
        self.group = group
        self._traffic = traffic or Traffic()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._in_pieces = dist.get_backend(group) == "gloo"

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Send inputs[i] to rank i and receive outputs[i] from rank i.

        Args:
            inputs, outputs: one contiguous vector per rank, of any dtype and size, also empty.
                inputs[b] of rank a has as many bytes as outputs[a] of rank b. Those of this rank
                itself are ignored.
        """
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        sent = sum(inputs[rank].nbytes for rank in peers)
        received = sum(outputs[rank].nbytes for rank in peers)
        device = inputs[0].device
        with self._traffic.operation(max(sent, received), device, self.group):
            if not self._in_pieces:
                # at once, as one operation: separate ones could wait for each other on NCCL
                self._exchange_at_once(self._pieces(inputs, outputs))
            elif device.type == "cuda":
                self._exchange_through_host(inputs, outputs)
            else:
                self._exchange(self._pieces(inputs, outputs))

    def _pieces(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list["_Piece"]:
        """Return the pieces of all messages, in the order in which they are posted."""
        pieces: list[_Piece] = []
        # every rank begins with another one, so that no receiver is congested
        for shift in range(1, self.world_size):
            source = (self.rank - shift) % self.world_size
            target = (self.rank + shift) % self.world_size
            both = zip_longest(self._cut(outputs[source]), self._cut(inputs[target]))
            for incoming, outgoing in both:
                if incoming is not None:
                    pieces.append(_Piece(source, incoming, False))
                if outgoing is not None:
                    pieces.append(_Piece(target, outgoing, True))
        return pieces

    def _exchange_through_host(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Exchange by page-locked copies, as of ranks that share a GPU, which NCCL refuses.

        gloo gives addresses to sockets, which refuse those of a GPU ("Bad address").
        """
        parts = {id(part): part for part in inputs}  # an all-gather sends one to all ranks
        sent = {
            key: _page_locked(part).copy_(part, non_blocking=True) for key, part in parts.items()
        }
        received = [_page_locked(part) for part in outputs]
        torch.cuda.current_stream(inputs[0].device).synchronize()
        self._exchange(self._pieces([sent[id(part)] for part in inputs], received))
        for rank, (part, copy) in enumerate(zip(outputs, received, strict=True)):
            if rank != self.rank:
                # PyTorch frees the copy when this one is done (CachingHostAllocator.h)
                part.copy_(copy, non_blocking=True)

    def gathering(
        self, shard: Tensor, parts: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return the arguments of the all-to-all that sends every rank's shard to all ranks.

        Args:
            parts: one per rank, all of one size; this rank's own part may be `shard` itself.
        """
        own = parts[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return [shard] * self.world_size, parts

    def _exchange(self, pieces: Sequence["_Piece"]) -> None:
        """Post pieces in order, a limited number of bytes at a time; await all."""
        in_flight: deque[tuple[_Piece, dist.Work | None]] = deque()
        # of both directions
        free = 2 * AT_ONCE * max([SMALL, *(piece.data.numel() for piece in pieces)])
        for piece in pieces:
            while free <= 0:
                first, work = in_flight.popleft()
                self._await(first, work)
                free += first.data.numel()
            if piece.is_sent:
                work = dist.isend(piece.data, group=self.group, tag=_TAG, group_dst=piece.peer)
            else:
                work = dist.irecv(piece.data, group=self.group, tag=_TAG, group_src=piece.peer)
            in_flight.append((piece, work))
            free -= piece.data.numel()
        for first, work in in_flight:
            self._await(first, work)

    def _await(self, piece: "_Piece", work: dist.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        try:
            work.wait()
        except RuntimeError as error:
            way = "to" if piece.is_sent else "from"
            peer = dist.get_global_rank(self.group, piece.peer)
            raise RuntimeError(f"bytes {way} rank {peer}: {error}") from error

    def _exchange_at_once(self, pieces: Sequence["_Piece"]) -> None:
        operations = [
            dist.P2POp(
                dist.isend if piece.is_sent else dist.irecv,
                piece.data,
                group=self.group,
                group_peer=piece.peer,
            )
            for piece in pieces
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _cut(self, part: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a message; none if it is empty, since the peer posts nothing."""
        size = part.nbytes
        if size == 0:
            return ()
        data = part.view(-1).view(torch.uint8)
        limit = PIECE if self.world_size == 2 else min(PIECE, max(SMALL, -(-size // AT_ONCE)))
        return data.split(limit) if self._in_pieces and size > limit else (data,)


def _page_locked(like: Tensor) -> Tensor:
    """Return uninitialized host memory of the same shape and type, for copies from or to a GPU."""
    return torch.empty_like(like, device="cpu", pin_memory=True)


class _Piece(NamedTuple):
    peer: int
    data: Tensor
    is_sent: bool
    """or received"""
