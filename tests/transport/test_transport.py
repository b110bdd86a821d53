"""Bytes arrive where they belong, whatever their sizes and however groups take turns."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from shardlab.launch import RunFailed, launch
from shardlab.transport.transport import PIECE, Transport
from tests.comm.wire import wire
from tests.ranks import on_ranks, run_ranks

SIZES = [0, 1, 7, PIECE - 1, PIECE, PIECE + 1, 6 * PIECE + 5]


def content(sender, receiver, size):
    generator = torch.Generator().manual_seed(100 * sender + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_gets_what_each_other_sent_it(world_size):
    def size(sender, receiver):
        return SIZES[(3 * sender + receiver) % len(SIZES)]

    def on_rank(group):
        transport = Transport(group)
        rank, ranks = transport.rank, range(world_size)
        given = [content(rank, to, size(rank, to)) for to in ranks]
        taken = [torch.zeros(size(sender, rank), dtype=torch.uint8) for sender in ranks]
        with wire() as sent:
            transport.exchange(given, taken)
        for sender in ranks:
            whole = content(sender, rank, size(sender, rank))
            # what a rank sends to itself is not touched
            assert torch.equal(taken[sender], whole * (sender != rank))
        assert sent.bytes == sum(size(rank, to) for to in ranks if to != rank)
        assert sent.largest <= PIECE
        return {}

    run_ranks(world_size, on_rank)


@on_ranks(3)
def test_a_rank_without_bytes_waits_for_nobody(group) -> None:
    """Rank 0 and 1 exchange bytes, rank 2 has none to send or to receive."""
    transport = Transport(group)
    size = [[0, 9, 0], [PIECE + 1, 0, 0], [0, 0, 0]]
    given = [torch.ones(n, dtype=torch.uint8) for n in size[transport.rank]]
    taken = [torch.zeros(row[transport.rank], dtype=torch.uint8) for row in size]
    for _ in range(3):
        transport.exchange(given, taken)
    assert all(part.all() for part in taken)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 3, 5 * PIECE // 4 + 1])
def test_shards_are_gathered_even_in_place(world_size, n):
    def on_rank(group):
        transport = Transport(group)
        apart, in_place = torch.zeros(2, world_size, n)
        shard = torch.full((n,), float(transport.rank))
        in_place[transport.rank] = shard
        transport.start_gather(shard, list(apart)).wait()
        transport.start_gather(in_place[transport.rank], list(in_place)).wait()
        return {"apart": apart, "in_place": in_place}

    expected = torch.arange(float(world_size)).view(-1, 1).expand(-1, n)
    for result in run_ranks(world_size, on_rank):
        assert torch.equal(result["apart"], expected) and torch.equal(result["in_place"], expected)


def test_transfers_of_several_groups_and_their_collectives_take_turns():
    n = 2 * PIECE

    def on_rank(group):
        rank = dist.get_rank(group)
        groups = [group, dist.new_group([0, 1, 2])]
        received, works = [], []
        for turn in range(3):
            for level in groups:
                given = [torch.full((n,), 10.0 * turn + rank) for _ in range(3)]
                taken = [torch.zeros(n) for _ in range(3)]
                works.append((Transport(level).start(given, taken), given))
                received.append((turn, taken))
            vector = torch.ones(n)
            dist.all_reduce(vector, group=groups[turn % 2])
            assert vector.eq(3).all()
        for work, _ in works:
            work.wait()
        for turn, taken in received:
            for sender in {0, 1, 2} - {rank}:
                assert taken[sender].eq(10.0 * turn + sender).all()
        return {}

    run_ranks(3, on_rank)


@pytest.mark.parametrize(
    ("ending", "words"),
    [(lambda: os._exit(0), "(closed|reset) by peer"), (lambda: time.sleep(60), "Timed out")],
    ids=["gone", "silent"],
)
def test_a_rank_that_does_not_answer_is_named(ending, words):
    def worker(group):
        transport = Transport(group)
        part = torch.zeros(10, dtype=torch.uint8)
        if transport.rank == 1:
            ending()
        transport.exchange([part] * 2, [part.clone() for _ in range(2)])

    with pytest.raises(RunFailed, match=f"(?s)RuntimeError: bytes (to|from) rank 1: .*{words}"):
        launch(worker, 2, threads=1, timeout_s=2)
