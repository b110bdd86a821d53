"""Work in child processes, so that the parent stays free of threads and can fork ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlab.core.files import read_json, write_json
from shardlab.emulation.link import Links
from shardlab.launch import launch

_LONGEST_WAIT_S = 1800.0


def on_ranks(
    world_size: int,
    function: Callable[[dist.ProcessGroup], Any],
    threads: int = 1,
    links: Links | None = None,
) -> list[Any]:
    """What `function` returned on each rank, a JSON value, in rank order."""
    with tempfile.TemporaryDirectory(prefix="shardlab-benchmark-") as folder:

        def worker(group: dist.ProcessGroup) -> None:
            write_json(Path(folder, str(dist.get_rank(group))), function(group))

        launch(worker, world_size, threads, _LONGEST_WAIT_S, links=links)
        return [read_json(Path(folder, str(rank))) for rank in range(world_size)]
