"""Description of the CPUs and the memory node of each rank."""

import os
from dataclasses import asdict

import torch.distributed as dist

from shardlab.experiment.affinity import format_cpus
from shardlab.experiment.schema import Train
from shardlab.hardware.placement import RankLocation, place_here
from shardlab.launch import launch
from shardlab.launch.placement import gpu_node, policy_nodes
from shardlab.transport.object_collectives import gather_values


def placements(group: dist.ProcessGroup) -> list[str]:
    """Return a line for each rank, in rank order; on every rank.

    CPUs and memory are read from the kernel. An engine with threads
    uses some of the CPUs for control, and others for its workers.

    Args:
        group: all ranks of the run.
    """
    rank, local_rank = dist.get_rank(group), int(os.environ["LOCAL_RANK"])
    first = rank - local_rank
    everywhere = gather_values(asdict(RankLocation.here(gpu_node())), group)
    here = everywhere[first : first + int(os.environ["LOCAL_WORLD_SIZE"])]
    mine = place_here([RankLocation(**each) for each in here])[local_rank]
    line = (
        f"CPUs {format_cpus(everywhere[rank]['cpus'])} (control {format_cpus(mine.control)}, "
        f"workers {format_cpus(mine.workers)}), memory of "
        f"{'node ' + format_cpus(policy_nodes()) if policy_nodes() else 'any node'}"
    )
    return gather_values(line, group)


def show_placements(train: Train) -> None:
    """Start the ranks as for a run, print a line for each, and end them.

    Raises:
        RunFailed, UserError: as `launch`.
    """

    def worker(group: dist.ProcessGroup) -> None:
        lines = placements(group)
        if dist.get_rank(group) == 0:
            print(*(f"rank {rank}: {line}" for rank, line in enumerate(lines)), sep="\n")

    launch(worker, train.world_size, train.threads, train.timeout_s, placement=train.placement)
