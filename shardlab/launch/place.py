"""Which of the commands that make up a run this one is.

A run of W ranks is started by n commands, of which each starts W / n ranks: one command alone, one
for every node, or as many as torchrun or srun have started.
"""

import os
import re
from dataclasses import dataclass
from typing import Literal

from shardlab.core.errors import UserError


@dataclass(frozen=True)
class Start:
    """What the user says about the start of a run."""

    nnodes: int = 1
    """commands, one per node"""
    node_rank: int = 0
    """number of this node, from 0 on"""
    master: str | None = None
    """HOST:PORT of node 0"""
    max_restarts: int = 0
    """how often the run begins again after a rank crashed, was killed or timed out"""


@dataclass(frozen=True)
class Place:
    """A command among all; those of one machine follow one another."""

    commands: int = 1
    command: int = 0
    commands_here: int = 1
    """on this machine"""
    command_here: int = 0
    master: tuple[str, int] | None = None
    """host and port where the first command awaits the others"""
    called: Literal["node", "task", "rank of torchrun"] = "node"
    """what the user knows a command as"""


def find_place(world_size: int, start: Start) -> Place:
    """From the options, else from what torchrun or srun left in the environment.

    Raises:
        UserError: options that do not fit together, the launcher or `world_size`.
    """
    _check(start)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _of_torchrun(world_size, start)
    place = Place()
    if start.nnodes > 1:
        place = Place(start.nnodes, start.node_rank, master=_address(start.master))
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        place = _of_srun(start)
    elif start.master is not None:
        raise UserError("--master is for several nodes: give --nnodes and --node-rank too")
    if world_size % place.commands:
        raise UserError(
            f"train.world_size: {world_size} ranks cannot be shared equally by {place.commands} "
            f"{place.called}s: choose a multiple"
        )
    return place


def _check(start: Start) -> None:
    if start.nnodes < 1:
        raise UserError(f"--nnodes {start.nnodes}: a run has one node or more")
    if not 0 <= start.node_rank < start.nnodes:
        raise UserError(
            f"--node-rank {start.node_rank}: expected 0 or more, and less than --nnodes "
            f"({start.nnodes})"
        )
    if start.nnodes > 1 and start.master is None:
        raise UserError("--nnodes needs --master HOST:PORT of node 0, the same on every node")
    if start.max_restarts < 0:
        raise UserError(f"--max-restarts {start.max_restarts}: expected 0 or more")


def _address(master: str | None) -> tuple[str, int]:
    host, _, port = (master or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--master {master}: expected HOST:PORT, for example node1:29500")
    return host, int(port)


def _of_torchrun(world_size: int, start: Start) -> Place:
    if start != Start():
        raise UserError(
            "--nnodes, --node-rank, --master and --max-restarts are torchrun's own: "
            "give them to torchrun"
        )
    started, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if started != world_size:
        raise UserError(
            f"torchrun started {started} ranks, train.world_size says {world_size}: make them equal"
        )
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: unset those, or "
            "start with torchrun"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    place = int(os.environ.get("LOCAL_RANK", rank))
    return Place(started, rank, here, place, called="rank of torchrun")


def _of_srun(start: Start) -> Place:
    """From the variables of a job step: those without STEP are in batch scripts, too."""

    def number(name: str) -> int:
        return int(os.environ[f"SLURM_{name}"])

    tasks, nodes = number("STEP_NUM_TASKS"), number("STEP_NUM_NODES")
    place, here = number("LOCALID"), tasks // nodes
    if tasks % nodes or number("PROCID") != number("NODEID") * here + place:
        raise UserError(
            "srun: the nodes have not each the same number of consecutive tasks: "
            "give --ntasks-per-node and --distribution=block"
        )
    if start.master is not None:
        master = _address(start.master)
    else:
        # below the ports that the kernel hands out; every step of a job has its own
        port = (1 << 14) + (number("JOB_ID") * 31 + number("STEP_ID")) % (1 << 14)
        master = first_host(os.environ["SLURM_STEP_NODELIST"]), port
    return Place(tasks, number("PROCID"), here, place, master, "task")


def first_host(nodes: str) -> str:
    """`gpu[03-07,9],login` -> `gpu03`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    assert match is not None, "it matches everything"
    return "".join(part or "" for part in match.groups())
