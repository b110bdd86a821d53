"""Latency of progress signals between ranks of one node.

    python -m benchmarks.node [--world-size W] [--turns T]

One run, the ways take turns of 200 calls each: microseconds of a call in the best turn and in the
median one. In `all`, every rank publishes a step and waits until all have, which is what a barrier
does; in `round trip`, rank 0 waits for what rank 1 publishes when it sees what rank 0 published.
"""

import statistics
import time
from collections.abc import Callable
from itertools import count

import torch.distributed as dist

from benchmarks.common import arguments
from shardlab.engines.slide.groups import node_groups
from shardlab.engines.slide.rank_progress import OFFLOADED, UPDATED, RankProgress
from shardlab.engines.slide.shared_memory import NodeMemory
from shardlab.train.launch import launch

_CALLS = 200


def ways(group: dist.ProcessGroup, progress: RankProgress) -> dict[str, Callable[[], object]]:
    """Ways of signalling progress between ranks."""
    everyone, there_and_back = count(1), count(1)
    rank = dist.get_rank(group)

    def publish_and_wait() -> None:
        step = next(everyone)
        progress.publish(OFFLOADED, 0, step)
        progress.wait(OFFLOADED, 0, step)

    def round_trip() -> None:
        step = next(there_and_back)
        if rank == 1:
            progress.wait(UPDATED, 0, step, ranks=[0])
        if rank < 2:
            progress.publish(UPDATED, 0, step)
        if rank == 0:
            progress.wait(UPDATED, 0, step, ranks=[1])

    return {
        OFFLOADED: publish_and_wait,
        "round trip": round_trip,
        "gloo barrier": lambda: dist.barrier(group),
    }


def show(group: dist.ProcessGroup, turns: int) -> None:
    """Print the table on rank 0."""
    here, _ = node_groups(group)
    memory = NodeMemory.create(here, {}, 1, timeout_s=60.0)
    calls = ways(here, memory.progress)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):
        for name, call in calls.items():
            dist.barrier(here)
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            taken[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    if dist.get_rank(group) == 0:
        barrier = statistics.median(taken["gloo barrier"][1:])
        print(f"{'us':<14}{'best':>8}{'median':>8}{'barrier / it':>14}")
        for name, (_, *times) in taken.items():
            middle = statistics.median(times)
            print(f"{name:<14}{min(times):>8.1f}{middle:>8.1f}{barrier / middle:>14.1f}")
    memory.close()


def main() -> None:
    args = arguments(__doc__, world_size=2, turns=25)
    launch(lambda group: show(group, args.turns), args.world_size, threads=1, timeout_s=120)


if __name__ == "__main__":
    main()
