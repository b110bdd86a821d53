"""Collects plain values and bytes from all ranks at rank 0, without pickling."""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The contents of all ranks, in rank order; on every rank."""
    world_size = dist.get_world_size(group)
    sizes = torch.zeros(world_size, dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(content)]), group=group)
    longest = int(sizes.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(content)] = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    everything = torch.empty(longest * world_size, dtype=torch.uint8)
    dist.all_gather_single(everything, mine, group=group)
    rows = everything.view(world_size, longest)
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The JSON values of all ranks, in rank order; on every rank."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode(), group)]
