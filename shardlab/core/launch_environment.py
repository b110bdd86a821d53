"""Environment of a process that is one rank, from the variables of torchrun or SLURM."""

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
        world_size: Value of `train.world_size`.

    Returns:
        position of this rank; None if no launcher started this process, which then starts all
        ranks.

    Raises:
        UserError: The launcher started a different number of ranks or unequal nodes, or its
            variables are incomplete.
    """
    launcher, variables = _launched()
    if launcher is None:
        return None
    missing = {"MASTER_ADDR", "MASTER_PORT"} - variables.keys()
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(sorted(missing))}: unset RANK and "
            "WORLD_SIZE, or start with torchrun"
        )
    rank, started = _number(variables, "RANK"), _number(variables, "WORLD_SIZE", 1)
    if started != world_size:
        raise UserError(
            f"{launcher} started {started} ranks, train.world_size says {world_size}: "
            "make them equal"
        )
    environment = RankEnvironment(
        rank,
        world_size,
        local_rank=_number(variables, "LOCAL_RANK", 0, rank),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 1, started),
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT", 1),
    )
    if not (rank < started and environment.local_rank < environment.local_world_size <= started):
        raise UserError(
            f"RANK {rank} of {started}, LOCAL_RANK {environment.local_rank} of "
            f"{environment.local_world_size}: count ranks from 0, below WORLD_SIZE and "
            "LOCAL_WORLD_SIZE"
        )
    if environment.master_port >= 1 << 16:
        raise UserError(f"MASTER_PORT {environment.master_port}: choose a port below 65536")
    return environment


def started_ranks() -> int | None:
    """Return how many ranks torchrun or srun started, or None if neither started this process.

    Raises:
        UserError: A variable of the launcher is missing or is not a number.
    """
    launcher, variables = _launched()
    return None if launcher is None else _number(variables, "WORLD_SIZE", 1)


def is_first_rank() -> bool:
    """Return whether this process starts all ranks, or is the first rank of a launcher.

    Raises:
        UserError: A variable of the launcher is missing or is not a number.
    """
    launcher, variables = _launched()
    return launcher is None or _number(variables, "RANK") == 0


def _launched() -> tuple[str | None, Mapping[str, str]]:
    """Return the launcher of this rank, or None, and its variables by torchrun's names."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun", os.environ
    # the variables of a job step: a batch script also has those without STEP
    if _number(os.environ, "SLURM_STEP_NUM_TASKS", 0, 1) > 1:
        return "srun", from_slurm(os.environ)
    return None, {}


def _number(
    variables: Mapping[str, str], name: str, minimum: int = 0, default: int | None = None
) -> int:
    """Return a variable as a number.

    Raises:
        UserError: The variable is not set, is not a number, or is below `minimum`.
    """
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set beside other variables of srun: start with srun")
    if not text.isdecimal() or int(text) < minimum:
        raise UserError(f"{name} is {text!r}: expected a whole number, at least {minimum}")
    return int(text)


def node_count(world_size: int) -> int:
    """Return the number of nodes of all ranks.

    Raises:
        UserError: As `rank_environment`.
    """
    environment = rank_environment(world_size)
    return 1 if environment is None else world_size // environment.local_world_size


def from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for an srun step with one task per rank.

    Unless they are set, MASTER_ADDR is the first node of the step, and MASTER_PORT is computed from
    the numbers of job and step.

    Raises:
        UserError: The nodes have different numbers of tasks, the tasks of a node are not
            consecutive, or a variable is missing.
    """

    def number(name: str) -> int:
        return _number(variables, f"SLURM_{name}")

    tasks, nodes = number("STEP_NUM_TASKS"), max(1, number("STEP_NUM_NODES"))
    rank, local_rank, local_world_size = number("PROCID"), number("LOCALID"), tasks // nodes
    if tasks % nodes or rank != number("NODEID") * local_world_size + local_rank:
        raise UserError(
            "srun: each node needs the same number of consecutive tasks: "
            "give --ntasks-per-node and --distribution=block"
        )
    if "SLURM_STEP_NODELIST" not in variables:
        raise UserError(
            "SLURM_STEP_NODELIST is not set beside other variables of srun: start with srun"
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
