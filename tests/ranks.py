"""Runs a function on real gloo ranks and brings home what each returns."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardlab.launch import launch
from shardlab.transport.link_emulation import Links

OnRank = Callable[[dist.ProcessGroup], dict[str, Tensor]]


def run_ranks(
    world_size: int, function: OnRank, timeout_s: float = 60, links: Links | None = None
) -> list[dict[str, Tensor]]:
    """The tensors that `function` returned on each rank, in rank order."""
    with tempfile.TemporaryDirectory() as folder:

        def worker(group: dist.ProcessGroup) -> None:
            torch.manual_seed(dist.get_rank(group))
            result = {k: v.detach().clone().contiguous() for k, v in function(group).items()}
            save_file(result, str(Path(folder, f"{dist.get_rank(group)}.safetensors")))

        launch(worker, world_size, threads=1, timeout_s=timeout_s, links=links)
        return [load_file(Path(folder, f"{rank}.safetensors")) for rank in range(world_size)]
