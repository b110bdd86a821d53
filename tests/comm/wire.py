"""What really goes through torch.distributed: the transport posts every byte by `dist.isend`."""

from contextlib import contextmanager

import torch.distributed as dist


class Sent:
    """Bytes that this rank handed to `dist.isend`, and a way to change them in flight."""

    def __init__(self):
        self.bytes = 0
        self.largest = 0
        self.change = lambda tensor: tensor


@contextmanager
def wire():
    """Counts, and lets a test change, the bytes that this rank sends while the block runs."""
    sent, original = Sent(), dist.isend
    kept = []  # what is sent must live until it has been

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
