"""Exchanges of bytes of any sizes, also of several groups at once."""

import os
import time

import pytest
import torch

from shardlab.comm.transport import PIECE, Transport
from shardlab.engines.slide_groups import gloo_group
from shardlab.train.launch import RunFailed, launch
from tests.comm.wire import wire
from tests.ranks import on_ranks

SIZES = [0, 1, 7, PIECE - 1, PIECE, PIECE + 1, 6 * PIECE + 5]


def content(sender, receiver, size):
    generator = torch.Generator().manual_seed(100 * sender + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_every_rank_receives_the_bytes_sent_to_it(group, world_size, device):
    def size(sender, receiver):
        return SIZES[(3 * sender + receiver) % len(SIZES)]

    transport = Transport(gloo_group(group))  # ranks with a GPU each have another one
    rank, ranks = transport.rank, range(world_size)
    given = [content(rank, to, size(rank, to)).to(device) for to in ranks]
    sizes = [size(sender, rank) for sender in ranks]
    taken = [torch.zeros(count, dtype=torch.uint8, device=device) for count in sizes]
    with wire() as sent:
        transport.all_to_all(given, taken)
    for sender in ranks:
        whole = content(sender, rank, size(sender, rank))
        # nothing is written for the rank itself
        assert torch.equal(taken[sender].cpu(), whole * (sender != rank))
    assert sent.bytes == sum(size(rank, to) for to in ranks if to != rank)
    assert sent.largest <= PIECE


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "words"),
    [(lambda: os._exit(0), "(closed|reset) by peer"), (lambda: time.sleep(60), "Timed out")],
    ids=["gone", "silent"],
)
def test_rank_that_does_not_answer_is_named(ending, words):
    def worker(group):
        transport = Transport(group)
        part = torch.zeros(10, dtype=torch.uint8)
        if transport.rank == 1:
            ending()
        transport.all_to_all([part] * 2, [part.clone() for _ in range(2)])

    with pytest.raises(RunFailed, match=f"(?s)RuntimeError: bytes (to|from) rank 1: .*{words}"):
        launch(worker, 2, threads=1, timeout_s=2)
