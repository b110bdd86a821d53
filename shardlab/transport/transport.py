"""Moves bytes of known sizes between the ranks of a group, in pieces on gloo.

gloo carries one large message in one direction at a time: two ranks that exchange 16 MiB use about
half of a full-duplex link. Pieces make it full duplex, whether of 256 KiB or of 1 MiB; the smaller
ones take up to several times as long where no link limits them. With more than two ranks, a rank
turns to one other after the other: streams to several at once meet at the same receivers, share
their links unevenly and leave some idle at the end. So a message is cut at least in halves and no
more than two pieces are in flight: it is nearly done with before the next begins. Messages that are
small leave to all ranks at once. Figures: `benchmarks/transport.py`. Pieces are slices of the
caller's buffers: nothing is copied.
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

from shardlab.transport.traffic import Traffic

PIECE = 1 << 20
"""bytes at most"""
SMALL = 1 << 17
"""bytes that are not cut, and so many times two are in flight in any case"""
AT_ONCE = 2
"""pieces to other ranks, and as many from them, from which on the next one waits"""
_TAG = 0x51AB
"""keeps our messages from those that a program sends between the same ranks by itself"""


class Transport:
    """All-to-all and all-gather of bytes over one process group.

    Messages between two ranks arrive in the order in which both ranks asked for them, so all ranks
    of a group make the same calls in the same order; groups do not disturb each other. What a rank
    sends to itself stays where it is.

    Args:
        traffic: that its operations belong to.

    Raises:
        RuntimeError: (all methods) a rank is gone or silent; names the rank.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic | None = None) -> None:
        self.group = group
        self._traffic = traffic or Traffic()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._in_pieces = dist.get_backend(group) == "gloo"

    def exchange(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """given[i] goes to rank i, taken[i] comes from rank i.

        Args:
            given, taken: one contiguous vector per rank, of any dtype and of any size down to none;
                rank a's given[b] has as many bytes as rank b's taken[a]. Those of this rank itself
                are not touched.
        """
        with self._traffic.operation(self._load(given, taken)):
            self._start(given, taken).wait()

    def start(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> dist.Work:
        """The same, but returns before all is done; `given` must stay as it is until then."""
        start = partial(self._start, given, taken)
        return self._traffic.awaited(start, self._load(given, taken))

    def gather(self, shard: Tensor, parts: Sequence[Tensor]) -> None:
        """Brings the shard of every rank, all of one size, to all ranks.

        Args:
            parts: one per rank; this rank's own part may be `shard` itself.
        """
        self.exchange(*self._gathering(shard, parts))

    def start_gather(self, shard: Tensor, parts: Sequence[Tensor]) -> dist.Work:
        """The same, but returns before all is done."""
        return self.start(*self._gathering(shard, parts))

    def _gathering(
        self, shard: Tensor, parts: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        own = parts[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return [shard] * self.world_size, parts

    def _load(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> int:
        """The bytes of the larger direction."""
        return max(
            sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
            for parts in (given, taken)
        )

    def _start(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> dist.Work:
        # cut before anything is posted: in a profile, communication lasts from then on
        waves = self._waves([_bytes(part) for part in given], [_bytes(part) for part in taken])
        return _Transfer(self._post, waves)

    def _waves(self, given: list[Tensor], taken: list[Tensor]) -> list[list["_Piece"]]:
        """Time after time a piece to one rank and a piece from another, rank after rank."""
        waves: list[list[_Piece]] = []
        # every rank turns to another one first
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
        """No pieces of nothing: the other rank may have nothing to post at all."""
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
        # devices carry them out as one operation
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
    """One exchange under way. Its first pieces are posted at once, the others while it is awaited,
    and so in the same order on all ranks."""

    def __init__(self, post: _Post, waves: list[list[_Piece]]) -> None:
        super().__init__()
        self._post = post
        self._waiting = deque(waves)
        self._limit = AT_ONCE * max([SMALL, *(_size(wave) for wave in waves)])
        self._in_flight: deque[tuple[int, list[_Posted]]] = deque()
        """bytes of the larger direction, and what was posted"""
        self._fill()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when every piece has arrived; the group's own timeout holds."""
        while self._in_flight:
            for posted in self._in_flight[0][1]:
                posted.wait()
            self._in_flight.popleft()
            self._fill()
        return True

    def _fill(self) -> None:
        room = self._limit - sum(size for size, _ in self._in_flight)
        while self._waiting and room > 0:
            wave = self._waiting.popleft()
            self._in_flight.append((_size(wave), self._post(wave)))
            room -= _size(wave)


def _size(wave: list[_Piece]) -> int:
    """Bytes of the larger direction."""
    return max(piece.data.numel() for piece in wave)


def _bytes(vector: Tensor) -> Tensor:
    return vector.view(-1).view(torch.uint8)
