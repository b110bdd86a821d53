"""Environment of a process that is one rank: as torchrun sets it, or derived from SLURM's."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.core.errors import UserError


@dataclass(frozen=True)
class RankEnvironment:
    """Position of one rank and address of the key-value store, as in torchrun's variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def rank_environment(world_size: int) -> RankEnvironment | None:
    """Read the variables of torchrun, or of srun with one task for each rank, in `os.environ`.

    Args:
        world_size: `train.world_size`.

    Returns:
        None when no launcher started this process: it starts all ranks by itself.

    Raises:
        UserError: the launcher started another number of ranks, or not in equal blocks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        variables: Mapping[str, str] = os.environ
        launcher = "torchrun"
    # the variables of a job step: those without STEP are set in batch scripts, too
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        variables = from_slurm(os.environ)
        launcher = "srun"
    else:
        return None
    started, rank = int(variables["WORLD_SIZE"]), int(variables["RANK"])
    if started != world_size:
        raise UserError(
            f"{launcher} started {started} ranks, train.world_size says {world_size}: "
            "make them equal"
        )
    if not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        raise UserError(
            "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: unset those, or "
            "start with torchrun"
        )
    return RankEnvironment(
        rank,
        world_size,
        local_rank=int(variables.get("LOCAL_RANK", rank)),
        local_world_size=int(variables.get("LOCAL_WORLD_SIZE", started)),
        master_addr=variables["MASTER_ADDR"],
        master_port=int(variables["MASTER_PORT"]),
    )


def node_count(world_size: int) -> int:
    """Return the number of nodes that the ranks of this process, or of its rank, are on.

    Raises:
        UserError: see `rank_environment`.
    """
    environment = rank_environment(world_size)
    return 1 if environment is None else world_size // environment.local_world_size


def from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Map the variables of an srun step with one task for each rank to those of torchrun.

    MASTER_ADDR is the first node of the step, and MASTER_PORT follows from the numbers of job and
    step, unless they are set already.

    Raises:
        UserError: the nodes have different numbers of tasks, or tasks that are not consecutive.
    """

    def number(name: str) -> int:
        return int(variables[f"SLURM_{name}"])

    tasks, nodes = number("STEP_NUM_TASKS"), number("STEP_NUM_NODES")
    rank, local_rank, local_world_size = number("PROCID"), number("LOCALID"), tasks // nodes
    if tasks % nodes or rank != number("NODEID") * local_world_size + local_rank:
        raise UserError(
            "srun: the nodes have not each the same number of consecutive tasks: "
            "give --ntasks-per-node and --distribution=block"
        )
    # below the ephemeral ports of the kernel; concurrent steps of a job get different ones
    port = (1 << 14) + (number("JOB_ID") * 31 + number("STEP_ID")) % (1 << 14)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": variables.get("MASTER_ADDR", first_host(variables["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
    }


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-07,9],login` -> `gpu03`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    assert match is not None, "every part is optional"
    return "".join(part or "" for part in match.groups())
