"""All-to-all and all-gather of bytes between the ranks of a group, in pieces on gloo.

gloo sends one large message in one direction at a time: two ranks that exchange 16 MiB use about
half of a full-duplex link. Pieces of 256 KiB or of 1 MiB make it full duplex; the smaller ones take
up to several times as long where no link limits them. With more than two ranks, a rank exchanges
with one other rank after another: concurrent streams to several ranks congest the same receivers,
share their links unevenly and leave some idle at the end. So a message is cut at least in halves
and at most two pieces are in flight: it has nearly ended before the next begins. Small messages are
sent to all ranks at once. Figures: `benchmarks/transport.py`. Pieces are slices of the caller's
buffers: nothing is copied.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.traffic import Traffic

PIECE = 1 << 20
"""bytes at most"""
SMALL = 1 << 17
"""bytes: shorter messages are not cut, and AT_ONCE times as many are always in flight"""
AT_ONCE = 2
"""maximum number of pieces in flight, in each direction"""
_TAG = 0x51AB
"""separates these messages from those of the program between the same ranks"""


class Transport:
    """All-to-all and all-gather of bytes over one process group.

    Messages between two ranks arrive in the order of the calls, so all ranks of a group make the
    same calls in the same order; groups are independent. A rank sends nothing to itself.

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

    def exchange(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send given[i] to rank i and receive taken[i] from rank i.

        Args:
            given, taken: one contiguous vector per rank, of any dtype and size, also empty.
                given[b] of rank a has as many bytes as taken[a] of rank b. Those of this rank
                itself are ignored.
        """
        with self._traffic.operation(self._load(given, taken), given[0].device):
            self._start(given, taken).wait()

    def start(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> dist.Work:
        """Start `exchange`; `given` must not change until the end of `wait()`."""
        start = partial(self._start, given, taken)
        return self._traffic.awaited(start, self._load(given, taken), given[0].device)

    def gather(self, shard: Tensor, parts: Sequence[Tensor]) -> None:
        """Send the shard of every rank, all of one size, to all ranks.

        Args:
            parts: one per rank; this rank's own part may be `shard` itself.
        """
        self.exchange(*self._gathering(shard, parts))

    def start_gather(self, shard: Tensor, parts: Sequence[Tensor]) -> dist.Work:
        """Start `gather`."""
        return self.start(*self._gathering(shard, parts))

    def _gathering(
        self, shard: Tensor, parts: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        own = parts[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return [shard] * self.world_size, parts

    def _load(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> int:
        """Return the bytes of the larger direction."""
        return max(
            sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
            for parts in (given, taken)
        )

    def _start(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> dist.Work:
        # cut before anything is posted: in a profile, communication begins with the first post
        waves = self._waves([_bytes(part) for part in given], [_bytes(part) for part in taken])
        return _Transfer(self._post, waves)

    def _waves(self, given: list[Tensor], taken: list[Tensor]) -> list[list["_Piece"]]:
        """Return pairs of a piece to one rank and a piece from another, rank after rank."""
        waves: list[list[_Piece]] = []
        # every rank begins with another one, so that no receiver is congested
        for shift in range(1, self.world_size):
            source = (self.rank - shift) % self.world_size
            to = (self.rank + shift) % self.world_size
            incoming = [_Piece(source, False, piece) for piece in self._cut(taken[source])]
            outgoing = [_Piece(to, True, piece) for piece in self._cut(given[to])]
            pairs = zip_longest(incoming, outgoing)
            waves.extend([piece for piece in pair if piece is not None] for pair in pairs)
        if self._in_pieces or not waves:
            return waves
        return [list(chain.from_iterable(waves))]

    def _cut(self, part: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a message; none if it is empty, since the peer posts nothing."""
        if part.numel() == 0:
            return ()
        if not self._in_pieces:
            return (part,)
        size = PIECE
        if self.world_size > 2:
            size = min(PIECE, max(SMALL, -(-part.numel() // AT_ONCE)))
        pieces: Sequence[Tensor] = part.split(size)
        return pieces

    def _post(self, pieces: list["_Piece"]) -> list["_Posted"]:
        if self._in_pieces:
            return [_Posted(piece, self._post_one(piece)) for piece in pieces]
        operations = [
            dist.P2POp(
                dist.isend if piece.outgoing else dist.irecv,
                piece.data,
                group=self.group,
                group_peer=piece.peer,
            )
            for piece in pieces
        ]
        # NCCL runs them as one operation; separate ones could wait for each other
        return [_Posted(pieces[0], work) for work in dist.batch_isend_irecv(operations)]

    def _post_one(self, piece: "_Piece") -> dist.Work | None:
        if piece.outgoing:
            return dist.isend(piece.data, group=self.group, tag=_TAG, group_dst=piece.peer)
        return dist.irecv(piece.data, group=self.group, tag=_TAG, group_src=piece.peer)


class _Piece(NamedTuple):
    peer: int
    outgoing: bool
    data: Tensor


class _Posted(NamedTuple):
    piece: _Piece
    work: dist.Work | None

    def wait(self) -> None:
        assert self.work is not None, "this rank is in the group"
        try:
            self.work.wait()
        except RuntimeError as error:
            direction = "to" if self.piece.outgoing else "from"
            raise RuntimeError(f"bytes {direction} rank {self.piece.peer}: {error}") from error


_Post = Callable[[list[_Piece]], list[_Posted]]


class _Transfer(dist.Work):
    """Exchange whose first pieces are posted at once and the others in `wait()`.

    All ranks post in the same order, since they start and await exchanges in the same order.
    """

    def __init__(self, post: _Post, waves: list[list[_Piece]]) -> None:
        super().__init__()
        self._post = post
        self._waiting = deque(waves)
        self._limit = AT_ONCE * max([SMALL, *(_size(wave) for wave in waves)])
        self._in_flight: deque[tuple[int, list[_Posted]]] = deque()
        """bytes of the larger direction, and the posted pieces"""
        self._fill()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until every piece has arrived, up to the group's timeout."""
        while self._in_flight:
            for posted in self._in_flight[0][1]:
                posted.wait()
            self._in_flight.popleft()
            self._fill()
        return True

    def _fill(self) -> None:
        free = self._limit - sum(size for size, _ in self._in_flight)
        while self._waiting and free > 0:
            wave = self._waiting.popleft()
            self._in_flight.append((_size(wave), self._post(wave)))
            free -= _size(wave)


def _size(wave: list[_Piece]) -> int:
    """Return the bytes of the larger direction."""
    return max(piece.data.numel() for piece in wave)


def _bytes(vector: Tensor) -> Tensor:
    return vector.view(-1).view(torch.uint8)
