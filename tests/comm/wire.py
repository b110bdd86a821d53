"""Vectors of ranks, values of all ranks, and the bytes that ranks send."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardlab.codecs.base import Unit
from shardlab.comm.emulated_link import LinkThrottle


def vector_of(rank, n, step=0):
    """The vector of a rank, which every rank can compute."""
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def vectors_of(world_size, n, step=0):
    return torch.stack([vector_of(rank, n, step) for rank in range(world_size)])


def gathered(value, group):
    """The values of all ranks, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_same_everywhere(tensor, group):
    return all(torch.equal(tensor, other) for other in gathered(tensor, group))


class Sent:
    """Bytes that this rank passed to `dist.isend`, and a way to change them in flight."""

    def __init__(self):
        self.bytes = 0
        self.largest = 0
        self.change = lambda tensor: tensor


@contextmanager
def wire():
    """Count, and let a test change, the bytes that the transport sends while the block runs."""
    sent, original = Sent(), dist.isend
    kept = []  # a tensor must live until it has been sent

    def isend(tensor, *args, **kwargs):
        sent.bytes += tensor.nbytes
        sent.largest = max(sent.largest, tensor.nbytes)
        kept.append(sent.change(tensor))
        return original(kept[-1], *args, **kwargs)

    dist.isend = isend
    try:
        yield sent
    finally:
        dist.isend = original


class CountingLink(LinkThrottle):
    """A link without limits that counts what it carries."""

    def __init__(self, ranks_per_node=1):
        super().__init__(0.0, ranks_per_node=ranks_per_node)
        self.bytes = 0.0
        self.operations = 0

    def carry(self, nbytes):
        self.bytes += nbytes
        self.operations += 1
        return super().carry(nbytes)


def scatter(ours, n, step=0, scale=1.0):
    """The shard of a reduce-scatter of the vectors of all ranks."""
    out = torch.empty(n)
    ours.reduce_scatter(out, vector_of(ours.rank, ours.world_size * n, step), scale, Unit("unit"))
    return out


def exact_shard(rank, world_size, n, step=0):
    return vectors_of(world_size, world_size * n, step).sum(0).chunk(world_size)[rank]
